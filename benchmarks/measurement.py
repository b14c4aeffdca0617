"""How long does all of the paper's section 2 take, from the logs of one regime?

    python benchmarks/measurement.py runs/default/traces/smollm2-135m_cot_*/

Prints CPU seconds per part as JSON (one core: set OMP_NUM_THREADS=1), reading the logs included, compiling not.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from wakekv.heads import bursts, churn, grading, markers, prefetch, wakeups
from wakekv.heads.reads import read
from wakekv.logs.demand import Demand
from wakekv.logs.trace import open_trace


def main(paths: list[str]) -> None:
    prefetch.prefetch(Demand.from_lists([[[0], [1]]]), np.zeros((1, 2), bool))  # compiles
    seconds, began = {}, time.process_time()

    def tick(part):
        nonlocal began
        seconds[part] = round(time.process_time() - began, 2)
        began = time.process_time()

    many = [read(open_trace(path)) for path in paths]
    tick("read")
    churn.churn_table(many)
    churn.drift_sweep(many, np.arange(0.1, 1.0, 0.1), (4, 8, 16, 32))
    tick("churn")
    for reading in (True, False):
        churn.survival([churn.spells(reads.active("continuous")) for reads in many], reading=reading)
    tick("spells")
    grading.wakeup_table(many)
    events = [wakeups.events(reads.score) for reads in many]
    z = [wakeups.zscores(reads) for reads in many]
    for name in z[0]:
        grading.precision_recall([scores[name] for scores in z], events, 32)
    tick("wakeups")
    markers.marker_table(many)
    tick("markers")
    bursts.burst_table(many)
    bursts.per_log(many)
    tick("bursts")
    prefetch.prefetch_table(many)
    tick("prefetch")
    print(json.dumps({"logs": len(paths), "seconds": seconds, "total": round(sum(seconds.values()), 2)}))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("give the directories of one regime's logs, for example runs/default/traces/*_cot_*/")
    main(sys.argv[1:])

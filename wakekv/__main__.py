"""The command line: python -m wakekv record, simulate, plan, quality, system, verify, reproduce, models, claims."""

from __future__ import annotations

import argparse
import difflib
import errno
import inspect
import os
import re
import signal
import sys
from collections.abc import Callable

from wakekv import __version__, commands, reviewing
from wakekv.errors import WakeKVError

EXTRAS = {"torch": "models", "transformers": "models", "matplotlib": "figures"}
EXTRAS |= dict.fromkeys(("papermill", "nbformat", "nbconvert"), "notebooks")
EXTRAS |= dict.fromkeys(("distributed", "joblib", "fsspec", "filelock"), "cluster")


def main(argv: list[str] | None = None) -> int:
    """Run one command. Exit status 0; 1 if a claim that is declared to hold failed; 2 on an error, told in one line."""
    if hasattr(sys.stdout, "reconfigure"):
        # progress shows at once, through a pipe too; what a terminal cannot show is shown as its number
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    options = _parser().parse_args(argv)
    try:
        return options.run(options) or 0
    except BrokenPipeError:  # the reader of our output has gone: nothing is left to tell it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (WakeKVError, ModuleNotFoundError, OSError) as error:
        if options.debug:
            raise
        print(f"wakekv: error: {_one_line(error, getattr(options, 'out', None))}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if options.debug or "home directory" not in str(error):
            raise
        print(
            "wakekv: error: there is no home directory to keep files in: set WAKEKV_CACHE to a folder", file=sys.stderr
        )
        return 2
    except KeyboardInterrupt:
        if options.debug:
            raise
        print("wakekv: interrupted; what was recorded is kept, and the same run goes on from there", file=sys.stderr)
        return 130


def _one_line(error: Exception, out: str | None = None) -> str:
    if isinstance(error, ModuleNotFoundError):
        missing = (error.name or "").split(".")[0]
        return f"{missing} is not installed: pip install 'wakekv[{EXTRAS.get(missing, 'all')}]', or make in a checkout"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = error.filename or out
        return f"the disk is full{f', writing {where}' if where else ''}: free some space, then the same command again"
    return " ".join(str(error).split()) or type(error).__name__


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        if found := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            near = difflib.get_close_matches(found[1], re.findall(r"[\w-]+", found[2]), 1)
            message += "".join(f"; did you mean {name}?" for name in near)
        self.exit(2, f"wakekv: error: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m wakekv",
        description="What heads read, which pages a policy keeps for them, and what that costs.",
        epilog="Each command has its own --help with examples. Errors are one line; --debug before it shows all.",
    )
    parser.add_argument("--version", action="version", version=f"wakekv {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the whole traceback of an error")
    known = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(run: Callable) -> Callable:
        """A command named and described by its function; returns what adds an option to it."""
        text, raw = inspect.getdoc(run), argparse.RawDescriptionHelpFormatter
        made = known.add_parser(run.__name__, help=text.splitlines()[0], description=text, formatter_class=raw)
        made.set_defaults(run=run)
        return made.add_argument

    add = command(commands.record)
    add("--model", default="smollm2-135m", metavar="NAME", help="a name from `models`, or a directory (%(default)s)")
    add("--regime", default="niah", metavar="NAME", help="niah, cot or multiturn (%(default)s)")
    add("--seed", type=int, default=0, help="of needles, problems, facts and sampling (%(default)s)")
    add("--depth", type=float, help="niah: where the needle lies, 0 is the start and 1 the end")
    add("--length", type=int, help="tokens of filler (the regime's own default)")
    add("--steps", type=int, help="decode steps at most (the whole script, or 256)")
    add("--k", type=int, default=64, help="largest weights kept per head and step (%(default)s, as the paper)")
    text = "feed a written answer, or let the model go on by itself; small models loop then (%(default)s)"
    add("--text", default="scripted", choices=("scripted", "greedy", "sampled"), help=text)
    add("--problems", metavar="FILE", help="cot: problems to use, such as MATH-500's test.jsonl")
    add("--filler", metavar="FILE", help="niah: any text file in place of the public-domain article")
    add("--dtype", default="auto", metavar="NAME", help="auto, float32, bfloat16 or float16 (%(default)s)")
    add("--device", default="auto", metavar="NAME", help="auto, cpu, cuda, cuda:1, mps (%(default)s)")
    add("--out", required=True, metavar="DIR", help="the log to make; must not exist")
    add("--resume", action="store_true", help="go on with an unfinished recording in --out")

    add = command(commands.simulate)
    add("trace", metavar="LOG", help="the directory of a log")
    add("--policy", required=True, metavar="NAME", help="such as full, frozen, reactive, evict")
    add("--budgets", default="8,16,32,64", metavar="B,B", help="pages per head (%(default)s, the paper's)")
    text = "query heads as in the paper, or the heads where KV lives (%(default)s)"
    add("--unit", default="head", choices=("head", "kv_head"), help=text)
    text = "start empty as the paper, or with the prompt known (%(default)s)"
    add("--first-touch", default="cold", choices=("cold", "warm"), help=text)
    text = "trim at the end of a step, or after every read (%(default)s)"
    add("--convention", default="batch", choices=("batch", "sequential"), help=text)
    add("--json", action="store_true", help="print one JSON object")

    add = command(commands.plan)
    add("trace", nargs="+", metavar="LOG", help="directories of logs, of one model")
    text = "what pages come over: pcie3, pcie4, pcie5, c2c, nvme, or measure (%(default)s)"
    add("--link", default="pcie4", metavar="NAME", help=text)
    add("--step-ms", type=float, required=True, metavar="MS", help="a decode step with everything resident")
    text = "the most that waiting may add to a step, as a share of it (%(default)s)"
    add("--max-slowdown", type=float, default=0.05, metavar="SHARE", help=text)
    text = "the most attention weight that may go unread, as a share of the logged (%(default)s)"
    add("--max-at-risk", type=float, default=0.001, metavar="SHARE", help=text)
    add("--batch", type=int, default=1, metavar="N", help="sequences decoded together (%(default)s)")
    add("--policies", default="reactive,commons,evict", metavar="P,P", help="which to compare (%(default)s)")
    add("--budgets", default="8,16,32,64,128", metavar="B,B", help="pages a KV head to print (%(default)s); all count")
    add("--dtype", metavar="NAME", help="of keys and values when served (that of the recording)")
    add("--json", action="store_true", help="print one JSON object, every budget")

    command(commands.document)

    add = command(commands.quality)
    add("--model", default="smollm2-135m", metavar="NAME", help="a name from `models`, or a directory (%(default)s)")
    add("--budgets", default="16,32", metavar="B,B", help="pages per KV head (%(default)s)")
    add("--lengths", default="2000", metavar="N,N", help="tokens of a prompt, or what it is truncated to (%(default)s)")
    add("--depths", default="0.25,0.5,0.75", metavar="D,D", help="where in it the number is hidden (%(default)s)")
    add("--seeds", type=int, default=1, metavar="N", help="prompts of each length and depth (%(default)s)")
    add("--longbench", nargs="+", metavar="FILE", help="files of the benchmark, in place of needles")
    add("--samples", type=int, metavar="N", help="the first N of each file (all)")
    add("--dtype", default="auto", metavar="NAME", help="auto, float32, bfloat16 or float16 (%(default)s)")
    add("--device", default="auto", metavar="NAME", help="auto, cpu, cuda, cuda:1, mps (%(default)s)")
    add("--json", action="store_true", help="print one JSON object")

    add = command(commands.system)
    add("--engine", default="vllm", choices=("vllm", "transformers"), help="where pages are moved (%(default)s)")
    add("--profile", default="cpu", metavar="NAME", help="smoke, cpu or a30 (%(default)s); what follows changes it")
    add("--model", metavar="NAME", help="a name from `models`, or a directory")
    add("--dtype", choices=("bfloat16", "float32"), help="of weights and cache")
    add("--requests", type=int, metavar="N", help="requests at a time")
    add("--length", type=int, metavar="N", help="tokens of a prompt")
    add("--n-tokens", type=int, metavar="N", help="tokens written after each")
    add("--budget", type=int, metavar="B", help="pages per KV head")
    add("--timing", choices=("exact", "lagged"), help="of the reactive ones: rank before attention, or after it")
    add("--repeats", type=int, metavar="N", help="batches of each configuration")
    add("--prompts", metavar="FILE", help="JSON lines with input, prompt or context, or any text")
    add("--longbench", nargs="+", metavar="FILE", help="files of the benchmark, to be answered and scored")
    add("--samples", type=int, metavar="N", help="the first N of each of these (30)")
    add("--needles", type=int, metavar="N", help="without such files: prompts of our own to be answered")
    add("--only", default="", metavar="NAME,NAME", help="these configurations, stock among them (all)")
    add("--out", metavar="DIR", help="one JSON a configuration (runs/system/<engine>-<profile>)")
    add("--json", action="store_true", help="print one JSON object")

    add = command(reviewing.verify)
    add("trace", nargs="*", metavar="LOG", help="the directory of a log")

    add = command(commands.reproduce)
    add("--profile", default="default", metavar="NAME", help="smoke, default or full (%(default)s)")
    add("--out", metavar="DIR", help="where results go (runs/<profile>)")
    add("--only", action="append", default=[], metavar="NN,NN", help="these notebooks, by number or name")
    text = "set a parameter that a notebook declares"
    add("-p", dest="parameter", action="append", default=[], metavar="NAME=VALUE", help=text)
    add("--force", action="store_true", help="run notebooks that are up to date, too")

    add = command(commands.models)
    add("--fetch", nargs="+", default=[], metavar="NAME", help="fetch these now, to be offline later")
    add("--json", action="store_true", help="print one JSON list")

    add = command(reviewing.tables)
    add("log", nargs="*", metavar="LOG", help="shipped logs, or directories of whole ones (all in artifact/logs)")
    add("--out", required=True, metavar="DIR", help="tables go to DIR/tables")

    add = command(reviewing.study)
    add("log", nargs="+", metavar="LOG", help="logs or folders of logs, here or in a store (s3://...)")
    add("--policies", default="", metavar="P,P", help="such as reactive,evict (the paper's four and the optimum)")
    add("--budgets", default="8,16,32,64", metavar="B,B", help="pages per head (%(default)s, the paper's)")
    add("--models", default="", metavar="NAME,NAME", help="logs of these models only (all)")
    add("--regimes", default="", metavar="NAME,NAME", help="logs of these regimes only (all)")
    add("--unit", default="head", choices=("head", "kv_head"), help="query heads or KV heads (%(default)s)")
    add("--first-touch", default="cold", choices=("cold", "warm"), help="start empty or not (%(default)s)")
    add("--jobs", type=int, default=1, metavar="N", help="processes on this machine (%(default)s)")
    add("--dask", metavar="ADDRESS", help="a Dask scheduler whose workers to use instead, tcp://host:8786")
    add("--out", required=True, metavar="DIR", help="results; a study that lies there goes on")

    add = command(reviewing.pack)
    add("log", nargs="+", metavar="LOG", help="directories of logs")
    add("--out", required=True, metavar="DIR", help="where the shipped logs and their manifest go")
    add("--prefix", default="", metavar="TEXT", help="put before each name")

    add = command(reviewing.compare)
    add("a", metavar="A", help="a run's folder, or reference")
    add("b", metavar="B", help="another")
    add("--tolerances", metavar="FILE", help="YAML rules (artifact/tolerances.yaml)")
    add("--exact", action="store_true", help="no tolerance but for what a clock measured")
    add("--only", nargs="+", choices=("tables", "figures", "claims"), help="these parts only")
    add("--both", action="store_true", help="leave out files that only one of them has")
    add("--json", action="store_true", help="print one JSON object")

    add = command(reviewing.spotcheck)
    add("log", nargs="*", metavar="LOG", help="shipped logs (the smoke-size one in artifact/logs)")
    add("--steps", type=int, metavar="N", help="the first N steps only (all)")
    add("--share", type=float, default=0.99, metavar="SHARE", help="of wants that must be equal (%(default)s)")
    add("--engine", default="transformers", choices=("transformers", "vllm"), help="what logs it (%(default)s)")
    add("--json", action="store_true", help="print one JSON list")

    add = command(reviewing.site)
    add("--run", dest="results", metavar="DIR", help="the run to show (what the repository shows)")
    add("--log", action="append", default=[], metavar="FILE", help="a shipped log for the explorer (artifact/logs)")
    add("--out", required=True, metavar="DIR", help="the folder to write")

    add = command(commands.claims)
    add("--out", default="runs/default", metavar="DIR", help="the run (%(default)s)")
    add("--json", action="store_true", help="print one JSON list")
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # unwinds: children end, half-files go
    sys.exit(main())

"""Several requests on one server: who holds memory, who computes, and whose pages come next (after Apt-Serve).

The server advances in iterations, as serving engines do: one clock, one next event, and arrivals in a sorted list. An
event library (simpy and its like) manages many processes that wait for one another; here there is one, so a loop says
it all and is quicker. Every page that a request waits for is one that its log really wanted: profile.py replays it.

    costs.py       what an iteration costs, fitted to measured steps; the link is an assumption
    profile.py     a log as a request: what each of its steps brings back
    foresight.py   will the next step bring back much? a logistic regression, and how good it is
    server.py      the loop
    schedulers.py  first come, value per memory, two queues, an oracle
    agents.py      several tenants on one pool: minima, fair shares, prefixes stored once

Sources: Apt-Serve (arXiv 2504.07494) for values, the greedy and hidden caching; the two queues are how it is retold.
"""

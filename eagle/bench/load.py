"""The `load` suite: requests arrive at random times, and the engine answers them with and without speculation.

Real time: a request that arrives while the engine is in a step waits for its end, and for a free place in the batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from eagle.bench.arrivals import Limits, LoadPoint, RequestTimes, load_point, poisson_arrivals
from eagle.bench.workload import Workload
from eagle.decode.control import LengthPolicy
from eagle.decode.engine import Engine
from eagle.decode.requests import Answer, Request


def run_load(
    engine: Engine,
    policy: int | LengthPolicy,
    work: Workload,
    *,
    rate: float,
    count: int,
    max_new_tokens: int,
    limits: Limits,
    seed: int,
    done: Callable[[], None],
) -> LoadPoint:
    """Answer `count` requests that arrive at `rate` per second (Poisson) and return what their times say.

    Stop tokens are ignored, so that each arm has the same work. `done` is called for each finished request.
    """
    arrivals = poisson_arrivals(rate, count, seed)
    prompts = work.window(0, count)
    answers: list[Answer] = []
    finished = 0
    with engine.decoding(policy) as run:
        began = run.clock()
        while finished < count:
            while len(answers) < count and arrivals[len(answers)] <= run.clock() - began:
                answers.append(run.submit(Request(prompts[len(answers)], max_new_tokens, key=len(answers))))
            if run.busy:
                run.step()
            else:
                time.sleep(max(0.0, arrivals[len(answers)] - (run.clock() - began)))
            ended = sum(answer.finish is not None for answer in answers)
            for _ in range(ended - finished):
                done()
            finished = ended
    times = [
        RequestTimes(at, a.first_token - began, a.finished - began, len(a.tokens)) for at, a in zip(arrivals, answers, strict=True)
    ]
    return load_point(rate, times, limits)

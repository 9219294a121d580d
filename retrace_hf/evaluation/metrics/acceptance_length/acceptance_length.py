"""Acceptance length of speculative decoding."""

import datasets
import evaluate

from retrace_hf.generation import AcceptanceStats


_DESCRIPTION = """
Acceptance length (tau) of speculative decoding: the mean number of tokens that a pass of the target yields, its
accepted proposals and the one token of the target itself. The prefill is no round; every later pass is one, also where
nothing was proposed. 1 is a drafter that is never right, B one that is always right in blocks of B.
"""

_KWARGS_DESCRIPTION = """
Args:
    predictions (`list` of `list` of `int`): For each request, how many proposals each of its rounds accepted
        (`accepted_per_round` of `retrace_hf.record_acceptance()`). A request without a round is an empty list.
    proposed (`list` of `list` of `int`, *optional*): How many proposals those rounds verified; adds `acceptance_at`.
    average (`str`, defaults to `"rounds"`): `"rounds"` pools the rounds of all requests; `"requests"` takes the mean
        of the requests' own tau, of those that have a round.
Returns:
    acceptance_length (`float`): tau, 1 or more.
    rounds (`int`): Rounds counted.
    new_tokens (`int`): Tokens generated, the one of each prefill included.
    acceptance_at (`list` of `float`, with `proposed`): For slot k = 1, 2, ... the share of rounds that accepted k
        proposals or more, among those that verified at least k.
Examples:
    Two requests, of two rounds and of one:

    >>> import evaluate
    >>> from retrace_hf.evaluation import metric_path
    >>> acceptance_length = evaluate.load(metric_path("acceptance_length"))
    >>> acceptance_length.compute(predictions=[[3, 0], [3]])
    {'acceptance_length': 3.0, 'rounds': 3, 'new_tokens': 11}

    The mean over requests, each with its own tau (2.5 and 4):

    >>> acceptance_length.compute(predictions=[[3, 0], [3]], average="requests")["acceptance_length"]
    3.25

    With the number of proposals, the share accepted at each slot:

    >>> acceptance_length.compute(predictions=[[2, 0], [1]], proposed=[[2, 2], [1]])["acceptance_at"]
    [0.6666666666666666, 0.5]
"""

_CITATION = """
@article{dflash2026,
    title = {DFlash: Block Diffusion for Flash Speculative Decoding},
    journal = {arXiv preprint arXiv:2602.06036},
    year = {2026},
}
"""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _KWARGS_DESCRIPTION)
class AcceptanceLength(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_KWARGS_DESCRIPTION,
            # float64, since int64 would cut a fraction off silently
            features=datasets.Features({"predictions": datasets.Sequence(datasets.Value("float64"))}),
            reference_urls=["https://arxiv.org/abs/2602.06036"],
        )

    def _compute(self, predictions, proposed=None, average="rounds"):
        if average not in ("rounds", "requests"):
            raise ValueError(f"average is {average!r}; it must be 'rounds' or 'requests'.")
        if proposed is not None and [len(p) for p in proposed] != [len(a) for a in predictions]:
            raise ValueError("proposed must have one number for each round in predictions.")
        requests = [
            self._stats(i, accepted, accepted if proposed is None else proposed[i])
            for i, accepted in enumerate(predictions)
        ]
        total = AcceptanceStats.pooled(requests)
        if not total.rounds:
            raise ValueError("predictions holds no round, and the mean of none is not a number.")
        tau = total.acceptance_length
        if average == "requests":
            own = [request.acceptance_length for request in requests if request.rounds]
            tau = sum(own) / len(own)
        found = {"acceptance_length": tau, "rounds": total.rounds, "new_tokens": total.new_tokens}
        return found if proposed is None else {**found, "acceptance_at": total.acceptance_at}

    def _stats(self, number, accepted, proposed):
        for a, p in zip(accepted, proposed):
            if a < 0 or a != int(a) or p != int(p):
                raise ValueError(
                    f"Request {number} accepted {a:g} of {p:g} proposals in a round; these are no counts."
                )
            if a > p:
                raise ValueError(f"Request {number} accepted {a:g} proposals in a round that verified {p:g}.")
        return AcceptanceStats([int(a) for a in accepted], [int(p) for p in proposed], calls=1)

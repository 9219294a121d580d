"""Share of outputs that equal plain decoding's."""

import datasets
import evaluate


_DESCRIPTION = """
Share of outputs that are exactly those of plain decoding. Greedy speculative decoding promises 1.0 in float32; in
bfloat16 a near-tie between two tokens may fall the other way now and then.
"""

_KWARGS_DESCRIPTION = """
Args:
    predictions (`list` of `list` of `int`, or `list` of `str`): What was generated with a drafter, as token ids or
        text. Token ids are the better choice: different ids can decode to one text.
    references (`list` of `list` of `int`, or `list` of `str`): What plain `generate()` gave for the same prompts.
Returns:
    match_rate (`float`): Share of outputs that are equal, from 0.0 to 1.0.
    matches (`int`): Their number.
    first_difference (`list` of `int`): For each output, the place of the first token (or character) where it parts
        from its reference; -1 where they are equal.
Examples:
    >>> import evaluate
    >>> from retrace_hf.evaluation import metric_path
    >>> match_rate = evaluate.load(metric_path("match_rate"))
    >>> match_rate.compute(predictions=[[5, 6, 7], [5, 9]], references=[[5, 6, 7], [5, 6, 7]])
    {'match_rate': 0.5, 'matches': 1, 'first_difference': [-1, 1]}

    With texts:

    >>> match_rate.compute(predictions=["Blue.", "Blue"], references=["Blue.", "Blue."])
    {'match_rate': 0.5, 'matches': 1, 'first_difference': [-1, 4]}
"""

_CITATION = ""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _KWARGS_DESCRIPTION)
class MatchRate(evaluate.Metric):
    def _info(self):
        ids, text = datasets.Sequence(datasets.Value("int64")), datasets.Value("string")
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_KWARGS_DESCRIPTION,
            features=[datasets.Features({"predictions": kind, "references": kind}) for kind in (ids, text)],
        )

    def compute(self, *, predictions=None, references=None, **kwargs):
        """As upstream, which fails on no predictions at all, looking for their kind."""
        if predictions is not None and not len(predictions):
            raise ValueError("predictions is empty, and a share of nothing is not a number.")
        return super().compute(predictions=predictions, references=references, **kwargs)

    def _compute(self, predictions, references):
        places = [self._first_difference(one, other) for one, other in zip(predictions, references)]
        matches = places.count(-1)
        return {"match_rate": matches / len(places), "matches": matches, "first_difference": places}

    def _first_difference(self, one, other):
        if list(one) == list(other):
            return -1
        return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))

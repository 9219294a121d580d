"""Speedup of speculative decoding over plain decoding."""

import math
import statistics

import datasets
import evaluate


_DESCRIPTION = """
How many times as fast a drafted `generate()` is as a plain one: the seconds of the plain call over those of the
drafted one, prompt by prompt. Time both in one run, turn about, so that a machine that drifts harms neither.
"""

_KWARGS_DESCRIPTION = """
Args:
    predictions (`list` of `float`): Seconds of each prompt with a drafter.
    references (`list` of `float`): Seconds of the same prompts without one.
    prediction_tokens (`list` of `int`, *optional*): Tokens generated with a drafter. With `reference_tokens` the
        seconds are compared for each token: needed where the texts differ in length, as under sampling.
    reference_tokens (`list` of `int`, *optional*): Tokens generated without one.
Returns:
    speculative_speedup (`float`): Median of the prompts' ratios; above 1 is faster than plain.
    total (`float`): Ratio of the sums (with tokens: of tokens a second over all prompts).
    ratios (`list` of `float`): The ratio of each prompt.
Examples:
    >>> import evaluate
    >>> from retrace_hf.evaluation import metric_path
    >>> speculative_speedup = evaluate.load(metric_path("speculative_speedup"))
    >>> speculative_speedup.compute(predictions=[1.0, 2.0, 4.0], references=[2.0, 3.0, 4.0])
    {'speculative_speedup': 1.5, 'total': 1.2857142857142858, 'ratios': [2.0, 1.5, 1.0]}

    Texts of another length, for each token:

    >>> speculative_speedup.compute(
    ...     predictions=[1.0], references=[2.0], prediction_tokens=[10], reference_tokens=[40]
    ... )["speculative_speedup"]
    0.5
"""

_CITATION = """
@inproceedings{leviathan2023fast,
    title = {Fast Inference from Transformers via Speculative Decoding},
    author = {Leviathan, Yaniv and Kalman, Matan and Matias, Yossi},
    booktitle = {International Conference on Machine Learning},
    year = {2023},
}
"""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _KWARGS_DESCRIPTION)
class SpeculativeSpeedup(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_KWARGS_DESCRIPTION,
            features=datasets.Features(
                {"predictions": datasets.Value("float64"), "references": datasets.Value("float64")}
            ),
            reference_urls=["https://arxiv.org/abs/2211.17192"],
        )

    def _compute(self, predictions, references, prediction_tokens=None, reference_tokens=None):
        if not len(predictions):
            raise ValueError("predictions is empty, and the median of nothing is not a number.")
        if (prediction_tokens is None) != (reference_tokens is None):
            raise ValueError("prediction_tokens and reference_tokens go together.")
        drafted_tokens = [1] * len(predictions) if prediction_tokens is None else prediction_tokens
        plain_tokens = [1] * len(predictions) if reference_tokens is None else reference_tokens
        for name, numbers in (
            ("predictions", predictions),
            ("references", references),
            ("prediction_tokens", drafted_tokens),
            ("reference_tokens", plain_tokens),
        ):
            if len(numbers) != len(predictions):
                raise ValueError(f"{name} has {len(numbers)} entries for {len(predictions)} prompts.")
            for number in numbers:
                if not (math.isfinite(number) and number > 0):
                    raise ValueError(f"{name} has {number}; each entry must be above 0 and finite.")
        ratios = [
            (plain / drafted) * (new / plain_new)
            for drafted, plain, new, plain_new in zip(predictions, references, drafted_tokens, plain_tokens)
        ]
        total = (sum(references) / sum(predictions)) * (sum(drafted_tokens) / sum(plain_tokens))
        return {"speculative_speedup": statistics.median(ratios), "total": total, "ratios": ratios}

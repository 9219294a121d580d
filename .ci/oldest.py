"""The oldest versions supported: constraints.txt, with transformers and what comes with it at pyproject's lower bound.

    python .ci/oldest.py             # prints these constraints
    python .ci/oldest.py --differs   # exit status 0 where transformers' lower bound is not what constraints.txt has

tokenizers is left to pip: transformers says which one it takes.
"""

import re
import sys
import tomllib
from pathlib import Path


ROOT = Path(__file__).parents[1]
AT_LOWER_BOUND = ("transformers", "huggingface_hub", "safetensors")
LEFT_TO_PIP = ("tokenizers",)


def version_key(version: str) -> tuple[int, ...]:
    """5.24 and 5.24.0 are one version."""
    numbers = [int(number) for number in version.split(".")]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def lower_bounds(pyproject: str) -> dict[str, str]:
    bounds = {}
    for requirement in tomllib.loads(pyproject)["project"]["dependencies"]:
        name, bound = re.match(r"([\w.-]+)\s*>=\s*([\d.]+)", requirement).groups()
        bounds[name] = bound
    return bounds


def pins(constraints: str) -> dict[str, str]:
    return dict(line.split("==") for line in constraints.split() if "==" in line)


def oldest(pyproject: str, constraints: str) -> dict[str, str]:
    bounds = lower_bounds(pyproject)
    found = {name: version for name, version in pins(constraints).items() if name not in LEFT_TO_PIP}
    return found | {name: bounds[name] for name in AT_LOWER_BOUND}


def differs(pyproject: str, constraints: str) -> bool:
    """Whether the oldest supported transformers is another than the one in constraints.txt."""
    name = "transformers"
    return version_key(lower_bounds(pyproject)[name]) != version_key(pins(constraints)[name])


def main():
    texts = (ROOT / "pyproject.toml").read_text(), (ROOT / "constraints.txt").read_text()
    if sys.argv[1:] == ["--differs"]:
        sys.exit(0 if differs(*texts) else 1)
    for name, version in oldest(*texts).items():
        print(f"{name}=={version}")


if __name__ == "__main__":
    main()

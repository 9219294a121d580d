"""A `custom_generate` folder that hands everything on."""

from transformers import GenerationMixin


def generate(model, **kwargs):
    return GenerationMixin.generate(model, **kwargs)

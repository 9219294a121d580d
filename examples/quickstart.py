"""
Greedy text of SmolLM2-135M-Instruct, drafted by ReTrace: the tokens of plain `generate()`, in fewer target passes.

    python examples/quickstart.py

Run it from the root of the repository, where model_cards/ is. Any target of `AutoModelForCausalLM` works the same way
with a drafter trained for it; `load_target` only adds that SmolLM2 is found on machines without a Hub, too.
"""

import retrace_hf
from retrace_hf.targets import load_target


target, tokenizer = load_target("HuggingFaceTB/SmolLM2-135M-Instruct")
drafter = retrace_hf.RetraceDrafter.from_pretrained("model_cards/retrace-smollm2-135m")
messages = [{"role": "user", "content": "Why is the sky blue?"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
with retrace_hf.record_acceptance() as stats:
    output = target.generate(**inputs, assistant_model=drafter, do_sample=False, max_new_tokens=128)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
print(f"{stats.acceptance_length:.2f} tokens per target pass")

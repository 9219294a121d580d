"""DFlash in plain torch, from what is published of its formats and from a folder alone: nothing of the package.

It reads the z-lab layout and that of speculators, keeps no cache, and computes every round from the start.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file


class ReferenceDFlash:
    """
    Args:
        folder (`Path`): `config.json` and `model.safetensors`, in the z-lab layout or that of speculators.
    """

    def __init__(self, folder: Path):
        config = json.loads((folder / "config.json").read_text())
        self.weights = {name: weight.float() for name, weight in load_file(folder / "model.safetensors").items()}
        if config["architectures"] == ["DFlashSpeculator"]:
            self.layer = config["transformer_layer_config"]
            self.taps = [i - 1 for i in config["aux_hidden_state_layer_ids"]]
            self.mask, self.block_size = config["mask_token_id"], config["block_size"]
        else:
            assert config["architectures"] == ["DFlashDraftModel"] and config["model_type"] == "qwen3"
            self.layer, nested = config, config["dflash_config"]
            self.taps, self.mask = nested["target_layer_ids"], nested["mask_token_id"]
            self.block_size = config.get("block_size") or nested["block_size"]

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + self.layer["rms_norm_eps"]).rsqrt() * self.weights[name]

    def heads(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return (x @ self.weights[name].T).view(len(x), -1, self.layer["head_dim"])  # [n, heads, d]

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        half = self.layer["head_dim"] // 2
        angles = positions[:, None] / self.layer["rope_theta"] ** (torch.arange(half) / half)  # [n, d / 2]
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def states(self, block: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
        """Last states `[Q, D]` of a block's embeddings `[Q, D]` behind tapped states `[n, F * D]`."""
        context = self.norm(taps @ self.weights["fc.weight"].T, "hidden_norm.weight")
        positions = torch.arange(len(taps) + len(block)).float()
        groups = self.layer["num_attention_heads"] // self.layer["num_key_value_heads"]
        x = block
        for i in range(self.layer["num_hidden_layers"]):
            name = f"layers.{i}."
            normed = self.norm(x, name + "input_layernorm.weight")
            both = torch.cat([context, normed])
            q = self.norm(self.heads(normed, name + "self_attn.q_proj.weight"), name + "self_attn.q_norm.weight")
            k = self.norm(self.heads(both, name + "self_attn.k_proj.weight"), name + "self_attn.k_norm.weight")
            v = self.heads(both, name + "self_attn.v_proj.weight").repeat_interleave(groups, dim=1)
            q, k = self.rotate(q, positions[len(taps) :]), self.rotate(k, positions).repeat_interleave(groups, dim=1)
            scores = torch.einsum("qhd,nhd->hqn", q, k) / self.layer["head_dim"] ** 0.5
            mixed = torch.einsum("hqn,nhd->qhd", scores.softmax(-1), v).flatten(1)
            x = x + mixed @ self.weights[name + "self_attn.o_proj.weight"].T
            normed = self.norm(x, name + "post_attention_layernorm.weight")
            gate = torch.nn.functional.silu(normed @ self.weights[name + "mlp.gate_proj.weight"].T)
            up = normed @ self.weights[name + "mlp.up_proj.weight"].T
            x = x + (gate * up) @ self.weights[name + "mlp.down_proj.weight"].T
        return self.norm(x, "norm.weight")

    @torch.no_grad()
    def draft(self, target, ids: torch.LongTensor) -> tuple[torch.Tensor, torch.LongTensor]:
        """Last states and drafted tokens behind `ids` `[n]`, whose last one is the anchor."""
        hidden = target(input_ids=ids[None, :-1], output_hidden_states=True).hidden_states
        taps = torch.cat([hidden[i + 1][0] for i in self.taps], dim=-1)
        # A speculators folder has embeddings and head of its own.
        embed = self.weights.get("embed_tokens.weight", target.get_input_embeddings().weight)
        head = self.weights.get("lm_head.weight", target.get_output_embeddings().weight)
        block = torch.tensor([int(ids[-1])] + [self.mask] * (self.block_size - 1))
        states = self.states(embed[block], taps)
        return states, (states[1:] @ head.T).argmax(-1)

    @torch.no_grad()
    def rounds(self, target, prompt: torch.LongTensor, max_new_tokens: int) -> tuple[list[int], list[list[int]]]:
        """Greedy speculative decoding: the new tokens, and what was drafted in each round."""
        ids = torch.cat([prompt[0], target(input_ids=prompt).logits[0, -1:].argmax(-1)])
        end, drafts = prompt.shape[1] + max_new_tokens, []
        while len(ids) < end:
            if len(ids) == end - 1:  # nothing to draft for
                return [
                    *ids[prompt.shape[1] :].tolist(),
                    int(target(input_ids=ids[None]).logits[0, -1].argmax()),
                ], drafts
            _, drafted = self.draft(target, ids)
            drafts.append(drafted.tolist())
            verified = target(input_ids=torch.cat([ids, drafted])[None]).logits[0, len(ids) - 1 :].argmax(-1)
            accepted = int((verified[:-1] == drafted).int().cumprod(0).sum())
            ids = torch.cat([ids, verified[: accepted + 1]])[:end]
        return ids[prompt.shape[1] :].tolist(), drafts

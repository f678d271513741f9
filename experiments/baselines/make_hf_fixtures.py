#!/usr/bin/env python3
"""Writes the parity fixtures tests/fixtures/hf_*: small random models and the logits that Hugging Face transformers gives.

Every folder holds config.json and the weights as transformers saves them, and reference.safetensors: `token` [S] and `logits`
[S][vocab] as f32, computed in fp32 arithmetic from the stored (rounded) weights with eager attention. Metadata names the versions.
The weights are wider than a usual initialisation and norms and biases are not trivial, so that attention is peaked and every
parameter matters.

Run once, from the top of the repository: python3 -m venv V && V/bin/pip install torch transformers
                                          V/bin/python experiments/baselines/make_hf_fixtures.py
Made with torch 2.15.0, transformers 5.24.0 (CPU)."""
import json
import os
import shutil
import sys

import torch
import transformers
from safetensors.torch import save_file
from transformers import (LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config,
                          Qwen3ForCausalLM)

SHAPE = dict(vocab_size=61, hidden_size=32, max_position_embeddings=128, bos_token_id=1, eos_token_id=2,
             attention_dropout=0.0)
LLAMA3 = dict(rope_type="llama3", rope_theta=500.0, factor=8.0, low_freq_factor=1.0,
              high_freq_factor=4.0, original_max_position_embeddings=32)
CASES = {
    # name: (class, config, stored type, tokens, shard size)
    "qwen3": (Qwen3ForCausalLM,
              Qwen3Config(**SHAPE, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
                          num_key_value_heads=2, head_dim=16, tie_word_embeddings=True,
                          rms_norm_eps=1e-6, rope_parameters=dict(rope_type="default", rope_theta=1e6)),
              torch.bfloat16, 96, "5GB"),
    "qwen2": (Qwen2ForCausalLM,
              Qwen2Config(**SHAPE, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
                          num_key_value_heads=2, tie_word_embeddings=False, rms_norm_eps=1e-6,
                          rope_parameters=dict(rope_type="default", rope_theta=1e4)),
              torch.float32, 64, "5GB"),
    "llama": (LlamaForCausalLM,
              LlamaConfig(**SHAPE, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4,
                          num_key_value_heads=1, tie_word_embeddings=False, rms_norm_eps=1e-5,
                          rope_parameters=dict(rope_type="default", rope_theta=1e4)),
              torch.float32, 64, "30KB"),
    "llama3": (LlamaForCausalLM,
               LlamaConfig(**SHAPE, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                           num_key_value_heads=2, head_dim=16, tie_word_embeddings=True,
                           rms_norm_eps=1e-5, rope_parameters=LLAMA3),
               torch.float16, 110, "5GB"),
}


def randomise(model, generator):
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        if "norm" in name:
            p.data = 1.0 + 0.3 * noise
        elif name.endswith("bias"):
            p.data = 0.5 * noise
        elif "embed" in name:
            p.data = noise
        else:
            p.data = noise * 1.5 / p.shape[1] ** 0.5


def main():
    top = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tests", "fixtures")
    torch.set_num_threads(1)
    for seed, (name, (cls, config, dtype, n_token, shard)) in enumerate(CASES.items()):
        out = os.path.join(top, "hf_" + name)
        shutil.rmtree(out, ignore_errors=True)
        generator = torch.Generator().manual_seed(1000 + seed)
        model = cls(config).eval()
        randomise(model, generator)
        model.to(dtype).save_pretrained(out, max_shard_size=shard)
        os.remove(os.path.join(out, "generation_config.json"))
        token = torch.randint(0, config.vocab_size, (n_token,), generator=generator)
        # Loaded anew: casting the model in place would also have rounded its RoPE frequencies.
        model = cls.from_pretrained(out, dtype=torch.float32, attn_implementation="eager").eval()
        with torch.no_grad():
            logits = model(token[None]).logits[0]
        meta = dict(torch=torch.__version__, transformers=transformers.__version__,
                    python=sys.version.split()[0], seed=str(1000 + seed), stored=str(dtype))
        save_file({"token": token.float(), "logits": logits.contiguous()},
                  os.path.join(out, "reference.safetensors"), metadata=meta)
        for file in os.listdir(out):
            os.chmod(os.path.join(out, file), 0o644)
        print(name, json.dumps(meta), "max |logit| %.3f" % logits.abs().max().item())


main()

#!/usr/bin/env python3
"""Compares an adapter that `rowan export --gguf` wrote with the PEFT directory it came from.

gguf_check.py MODEL ADAPTER FILE.gguf: the update (alpha / r) B A that llama.cpp computes from the file must be PEFT's s B A, its rows permuted for
q and k as convert_hf_to_gguf.py permutes the base weight. Reads the file byte by byte, and once more with the package gguf where that is
installed. Needs numpy. Status 0 when all modules agree.
"""
import json
import re
import struct
import sys

import numpy as np

NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
         "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
ARCHITECTURES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}


def read_safetensors(path):
    with open(path, "rb") as file:
        data = file.read()
    length, = struct.unpack_from("<Q", data)
    tensors = {}
    for name, info in json.loads(data[8:8 + length]).items():
        if name == "__metadata__":
            continue
        begin, end = (8 + length + offset for offset in info["data_offsets"])
        raw = data[begin:end]
        if info["dtype"] == "BF16":
            values = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(raw, {"F32": "<f4", "F16": "<f2"}[info["dtype"]])
        tensors[name] = values.reshape(info["shape"]).astype(np.float64)
    return tensors


def read_gguf(path):
    """Metadata and tensors of a version 3 file, by its description alone."""
    with open(path, "rb") as file:
        data = file.read()
    at = 0

    def take(form):
        nonlocal at
        values = struct.unpack_from("<" + form, data, at)
        at += struct.calcsize("<" + form)
        return values if len(values) > 1 else values[0]

    def take_string():
        return take(f"{take('Q')}s").decode()

    assert take("4s") == b"GGUF" and take("I") == 3
    tensor_count, metadata_count = take("QQ")
    metadata = {}
    for _ in range(metadata_count):
        key = take_string()
        kind = take("I")
        metadata[key] = take_string() if kind == 8 else take({4: "I", 6: "f"}[kind])
    infos = []
    for _ in range(tensor_count):
        name = take_string()
        extents = [take("Q") for _ in range(take("I"))]
        infos.append((name, extents, *take("IQ")))
    start = (at + 31) // 32 * 32
    tensors = {}
    for name, extents, kind, offset in infos:
        count = int(np.prod(extents))
        values = np.frombuffer(data, {0: "<f4", 1: "<f2"}[kind], count, start + offset)
        tensors[name] = values.reshape(extents[::-1]).astype(np.float64)
    return metadata, tensors


def read_with_package(path):
    """The same through the package gguf; None where it is not installed."""
    try:
        import gguf
    except ImportError:
        return None
    reader = gguf.GGUFReader(path)
    metadata = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    return metadata, {tensor.name: np.array(tensor.data, np.float64) for tensor in reader.tensors}


def first_match(patterns, module, otherwise):
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), otherwise)


def updates_of(adapter):
    """Module -> s B A."""
    with open(f"{adapter}/adapter_config.json") as file:
        config = json.load(file)
    factors = read_safetensors(f"{adapter}/adapter_model.safetensors")
    updates = {}
    for key, a in factors.items():
        if not key.endswith(".lora_A.weight"):
            continue
        module = key[len("base_model.model."):-len(".lora_A.weight")]
        rank = first_match(config.get("rank_pattern") or {}, module, config["r"])
        alpha = first_match(config.get("alpha_pattern") or {}, module, config["lora_alpha"])
        scale = alpha / (rank ** 0.5 if config.get("use_rslora") else rank)
        updates[module] = scale * factors[key.replace("lora_A", "lora_B")] @ a
    return updates


def permute(weight, heads):
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def largest_difference(model, adapter, metadata, tensors):
    """Relative to the largest entry of each update. Raises AssertionError for names and metadata that do not fit."""
    with open(f"{model}/config.json") as file:
        config = json.load(file)
    architecture = ARCHITECTURES[config["architectures"][0]]
    assert metadata["general.architecture"] == architecture, metadata
    assert metadata["general.type"] == "adapter" and metadata["adapter.type"] == "lora", metadata
    updates = updates_of(adapter)
    assert len(tensors) == 2 * len(updates), sorted(tensors)
    worst = 0.0
    for module, update in updates.items():
        block, name = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", module).groups()
        if architecture == "llama" and name == "self_attn.q_proj":
            update = permute(update, config["num_attention_heads"])
        if architecture == "llama" and name == "self_attn.k_proj":
            update = permute(update, config.get("num_key_value_heads") or config["num_attention_heads"])
        a, b = (tensors[f"blk.{block}.{NAMES[name]}.weight.lora_{factor}"] for factor in "ab")
        got = metadata["adapter.lora.alpha"] / b.shape[1] * b @ a
        worst = max(worst, float(np.abs(got - update).max() / max(np.abs(update).max(), 1e-300)))
    return worst


def check(model, adapter, path):
    """Worst difference by the reader's name; readers that are not installed are left out."""
    results = {"own reader": largest_difference(model, adapter, *read_gguf(path))}
    packaged = read_with_package(path)
    if packaged is not None:
        results["gguf package"] = largest_difference(model, adapter, *packaged)
    return results


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    differences = check(*sys.argv[1:])
    for name, difference in differences.items():
        print(f"{name}: largest relative difference {difference:.2e}")
    sys.exit(0 if max(differences.values()) < 2e-3 else 1)  # float16 factors; float32 ones come out below 1e-6

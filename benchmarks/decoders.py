"""A Llama-like model in the forms of four programs, and each program's steps (:mod:`benchmarks.bench_decoders`).

A step takes the next tokens of all sequences, and returns the logits behind the last of each. Its keys and values stay
with the program.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

OURS = "fmtprop"

#: a model of 1.1 billion parameters
SIZES = {
    "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
    "num_attention_heads": 32, "num_key_value_heads": 4, "max_position_embeddings": 2048,
}  # fmt: skip

Logits = np.ndarray[Any, Any]
#: a step: tokens of all sequences [batch, count] -> the last logits of each
Step = Callable[[np.ndarray[Any, Any]], Logits]


# ---------------------------------------------------------------- files


def write_gguf(folder: Path, weights: str) -> None:
    """Write the model as a GGUF file, with the pairs of rotary embeddings side by side."""
    import gguf

    model = model_of(folder)
    c = model.config
    kind = {"bf16": gguf.GGMLQuantizationType.BF16, "int8": gguf.GGMLQuantizationType.Q8_0}.get(
        weights, gguf.GGMLQuantizationType.Q4_0
    )
    writer = gguf.GGUFWriter(folder / f"{weights}.gguf", "llama")
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_dimension_count(c.hidden_size // c.num_attention_heads)
    writer.add_vocab_size(c.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    parts = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    others = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, tensor in model.state_dict().items():
        stem = name.removesuffix(".weight")
        if stem in others:
            own = others[stem]
        else:
            _, _, layer, part = stem.split(".", 3)
            own = f"blk.{layer}.{parts[part]}"
        data = tensor.float().numpy()
        for part, heads in (("attn_q", c.num_attention_heads), ("attn_k", c.num_key_value_heads)):
            if own.endswith(part):
                data = data.reshape(heads, 2, -1, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
        if data.ndim == 2:
            writer.add_tensor(f"{own}.weight", gguf.quants.quantize(np.ascontiguousarray(data), kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{own}.weight", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class _Stateful(torch.nn.Module):
    """A step with its keys and values as arguments and results."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, beams: torch.Tensor, *cache: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return the last logits, and the keys and values with the new tokens."""
        from transformers import DynamicCache
        from transformers.cache_utils import DynamicLayer

        known = DynamicCache()
        for at in range(0, len(cache), 2):
            layer = DynamicLayer()
            layer.lazy_initialization(*cache[at : at + 2])
            layer.keys, layer.values = (one.index_select(0, beams) for one in cache[at : at + 2])
            known.layers.append(layer)
        out = self.model(
            input_ids=ids, position_ids=positions, attention_mask=mask, past_key_values=known, use_cache=True,
            logits_to_keep=1,
        )  # fmt: skip
        made = [one for layer in out.past_key_values.layers for one in (layer.keys, layer.values)]
        return (out.logits[:, -1], *made)


def write_ir(folder: Path, weights: str) -> None:
    """Write the model as OpenVINO's IR, with keys and values as its state, as Optimum does."""
    import nncf
    import openvino as ov
    from openvino import opset13 as ops
    from openvino._offline_transformations import apply_make_stateful_transformation

    model = model_of(folder).float()
    c = model.config
    size, layers = c.hidden_size // c.num_attention_heads, c.num_hidden_layers
    cache = [torch.randn(2, c.num_key_value_heads, 3, size) for _ in range(2 * layers)]
    example = (torch.ones(2, 4).long(), torch.arange(4).repeat(2, 1), torch.zeros(2, 1, 4, 7), torch.arange(2), *cache)
    with torch.no_grad():
        made = ov.convert_model(_Stateful(model).eval(), example_input=example)
    del model
    names = ["ids", "positions", "mask", "beams", *(f"past{i}" for i in range(2 * layers))]
    free = [[-1, -1], [-1, -1], [-1, 1, -1, -1], [-1], *[[-1, c.num_key_value_heads, -1, size]] * (2 * layers)]
    for port, name in zip(made.inputs, names, strict=True):
        port.get_tensor().set_names({name})
    made.reshape(dict(zip(made.inputs, map(ov.PartialShape, free), strict=True)))
    for index, port in enumerate(made.outputs):
        port.get_tensor().set_names({f"present{index - 1}" if index else "logits"})
    apply_make_stateful_transformation(made, {f"past{i}": f"present{i}" for i in range(2 * layers)})
    batch = ops.gather(ops.shape_of(made.input("ids"), output_type="i64"), ops.constant([0]), ops.constant(0))
    for op in made.get_ops():
        if op.get_type_name() == "ReadValue":
            dims = [ops.constant(np.array([one.min_length])) for one in op.get_output_partial_shape(0)]
            zero = ops.constant(0.0, dtype=op.get_output_element_type(0))
            op.set_arguments([ops.broadcast(zero, ops.concat([batch, *dims[1:]], axis=0))])
    made.validate_nodes_and_infer_types()
    if weights != "bf16":
        sizes = {"mode": nncf.CompressWeightsMode.INT8_SYM}
        if weights == "int4":
            sizes = {"mode": nncf.CompressWeightsMode.INT4_SYM, "group_size": 128, "ratio": 1.0}
        made = nncf.compress_weights(made, **sizes)
    ov.save_model(made, folder / f"{weights}.xml", compress_to_fp16=False)


def model_of(folder: Path) -> Any:
    """Return the model of transformers, in bf16."""
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16).eval().requires_grad_(False)


# ---------------------------------------------------------------- contenders


def in_torch(model: Any, most: int) -> Step:
    """Return the steps of a model of transformers with a static cache of `most` tokens."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=most)

    def step(tokens: np.ndarray[Any, Any]) -> Logits:
        with torch.inference_mode():
            out = model(torch.from_numpy(tokens), past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].float().numpy()

    return step


def fmtprop(folder: Path, weights: str, most: int, threads: int) -> Step:
    """Return our steps: a model that :func:`fmtprop.optimize` compiled."""
    import fmtprop as fp

    model = model_of(folder)
    return in_torch(fp.optimize(model, dtype="bf16", weights=None if weights == "bf16" else weights), most)


def pytorch(folder: Path, weights: str, most: int, threads: int) -> Step:
    """Return the steps of Inductor, with torchao's codes where weights have few bits."""
    model = model_of(folder)
    if weights != "bf16":
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        few = PrototypeInt4WeightOnlyConfig(group_size=128)  # the form for CPUs
        quantize_(model, Int8WeightOnlyConfig() if weights == "int8" else few)
    torch._inductor.config.freezing = weights == "bf16"
    model.forward = torch.compile(model.forward)
    return in_torch(model, most)


def openvino(folder: Path, weights: str, most: int, threads: int) -> Step:
    """Return the steps of OpenVINO, with bf16 where the CPU has it."""
    import openvino as ov

    how = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "bf16"}
    request = ov.Core().compile_model(folder / f"{weights}.xml", "CPU", how).create_infer_request()
    done = 0

    def step(tokens: np.ndarray[Any, Any]) -> Logits:
        nonlocal done
        batch, count = tokens.shape
        positions = np.arange(done, done + count)
        mask = np.where(np.arange(done + count) <= positions[:, None], 0, np.finfo(np.float32).min).astype(np.float32)
        given = {
            "ids": tokens, "positions": np.tile(positions, (batch, 1)), "mask": np.tile(mask, (batch, 1, 1, 1)),
            "beams": np.arange(batch),
        }  # fmt: skip
        done += count
        return np.array(request.infer(given)["logits"])

    return step


def llama_cpp(folder: Path, weights: str, most: int, threads: int) -> Step:
    """Return the steps of llama.cpp; each sequence of a batch has its own keys and values."""
    import llama_cpp as l

    l.llama_backend_init()
    model = l.llama_load_model_from_file(str(folder / f"{weights}.gguf").encode(), l.llama_model_default_params())
    words, context, done = l.llama_n_vocab(l.llama_model_get_vocab(model)), None, 0

    def step(tokens: np.ndarray[Any, Any]) -> Logits:
        nonlocal context, done
        batch, count = tokens.shape
        if context is None:
            given = l.llama_context_default_params()
            given.n_ctx, given.n_batch, given.n_seq_max = batch * most, max(batch * count, 64), batch
            given.n_threads = given.n_threads_batch = threads
            context = l.llama_new_context_with_model(model, given)
        made = l.llama_batch_init(batch * count, 0, 1)
        made.n_tokens = batch * count
        for at, (sequence, place) in enumerate(product(range(batch), range(count))):
            made.token[at], made.pos[at] = int(tokens[sequence, place]), done + place
            made.n_seq_id[at], made.seq_id[at][0] = 1, sequence
            made.logits[at] = place == count - 1
        if l.llama_decode(context, made):
            raise RuntimeError("llama_decode failed")
        ends = [sequence * count + count - 1 for sequence in range(batch)]
        logits = [np.ctypeslib.as_array(l.llama_get_logits_ith(context, end), (words,)).copy() for end in ends]
        l.llama_batch_free(made)
        done += count
        return np.stack(logits)

    return step


CONTENDERS = {OURS: fmtprop, "pytorch": pytorch, "openvino": openvino, "llama.cpp": llama_cpp}
#: the ending of a program's file, and what writes it
WRITERS = {"openvino": ("xml", write_ir), "llama.cpp": ("gguf", write_gguf)}

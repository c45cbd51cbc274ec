"""The Llama of the CPU benchmarks as one would write it in PyTorch for speed: fused qkv and gate_up, sdpa, F.rms_norm.

    llama.py make SHAPE FOLDER     writes random weights as a Hugging Face directory
"""
import json
import pathlib
import sys

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

SHAPES = {  # sequences are per rank and step
    "34m": {"width": 512, "layers": 8, "ffn": 1408, "vocabulary": 8192, "sequences": 2, "tokens": 512},
    "9m": {"width": 256, "layers": 6, "ffn": 704, "vocabulary": 8192, "sequences": 1, "tokens": 256},
    "134m": {"width": 768, "layers": 12, "ffn": 2048, "vocabulary": 32000, "sequences": 1, "tokens": 512},
    "302m": {"width": 1024, "layers": 18, "ffn": 2816, "vocabulary": 32000, "sequences": 1, "tokens": 512},
    "tiny": {"width": 128, "layers": 2, "ffn": 352, "vocabulary": 512, "sequences": 1, "tokens": 64},
}
HEAD, THETA, EPS = 64, 10000.0, 1e-6


class Layer(torch.nn.Module):
    def __init__(self, width, ffn):
        super().__init__()
        self.heads = width // HEAD
        self.input_norm = torch.nn.Parameter(torch.ones(width))
        self.post_norm = torch.nn.Parameter(torch.ones(width))
        self.qkv = torch.nn.Linear(width, 3 * width, bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)
        self.gate_up = torch.nn.Linear(width, 2 * ffn, bias=False)
        self.down = torch.nn.Linear(ffn, width, bias=False)

    def forward(self, x, cos, sin):
        batch, length, width = x.shape
        h = F.rms_norm(x, (width,), self.input_norm, EPS)
        q, k, v = self.qkv(h).view(batch, length, 3, self.heads, HEAD).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(h.transpose(1, 2).reshape(batch, length, -1))
        gate, up = self.gate_up(F.rms_norm(x, (width,), self.post_norm, EPS)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Llama(torch.nn.Module):
    def __init__(self, shape):
        super().__init__()
        width = shape["width"]
        self.embedding = torch.nn.Embedding(shape["vocabulary"], width)
        self.layers = torch.nn.ModuleList(Layer(width, shape["ffn"]) for _ in range(shape["layers"]))
        self.norm = torch.nn.Parameter(torch.ones(width))
        self.head = torch.nn.Linear(width, shape["vocabulary"], bias=False)
        frequency = THETA ** (-torch.arange(0, HEAD, 2, dtype=torch.float64) / HEAD)
        angle = torch.outer(torch.arange(shape["tokens"], dtype=torch.float64), frequency)
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)

    def forward(self, ids, targets):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = self.head(F.rms_norm(x, (x.shape[-1],), self.norm, EPS))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))

    def load(self, folder):
        """From the Hugging Face directory that `make` writes."""
        tensors = load_file(pathlib.Path(folder) / "model.safetensors")
        with torch.no_grad():
            self.embedding.weight.copy_(tensors["model.embed_tokens.weight"])
            self.norm.copy_(tensors["model.norm.weight"])
            self.head.weight.copy_(tensors["lm_head.weight"])
            for i, layer in enumerate(self.layers):
                part = {k.removeprefix(f"model.layers.{i}."): v for k, v in tensors.items() if k.startswith(f"model.layers.{i}.")}
                layer.input_norm.copy_(part["input_layernorm.weight"])
                layer.post_norm.copy_(part["post_attention_layernorm.weight"])
                layer.qkv.weight.copy_(torch.cat([part[f"self_attn.{n}_proj.weight"] for n in "qkv"]))
                layer.out.weight.copy_(part["self_attn.o_proj.weight"])
                layer.gate_up.weight.copy_(torch.cat([part[f"mlp.{n}_proj.weight"] for n in ("gate", "up")]))
                layer.down.weight.copy_(part["mlp.down_proj.weight"])


def make(shape, folder):
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(1)
    width, ffn, vocabulary = shape["width"], shape["ffn"], shape["vocabulary"]

    def matrix(rows, columns):
        return torch.randn(rows, columns, generator=generator) * 0.02

    tensors = {"model.embed_tokens.weight": matrix(vocabulary, width), "model.norm.weight": torch.ones(width),
               "lm_head.weight": matrix(vocabulary, width)}
    for i in range(shape["layers"]):
        at = f"model.layers.{i}."
        tensors |= {at + f"self_attn.{n}_proj.weight": matrix(width, width) for n in "qkvo"}
        tensors |= {at + "mlp.gate_proj.weight": matrix(ffn, width), at + "mlp.up_proj.weight": matrix(ffn, width),
                    at + "mlp.down_proj.weight": matrix(width, ffn), at + "input_layernorm.weight": torch.ones(width),
                    at + "post_attention_layernorm.weight": torch.ones(width)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocabulary, "hidden_size": width,
        "intermediate_size": ffn, "num_hidden_layers": shape["layers"], "num_attention_heads": width // HEAD,
        "num_key_value_heads": width // HEAD, "max_position_embeddings": shape["tokens"], "rms_norm_eps": EPS,
        "rope_theta": THETA, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "float32"}))


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] != "make" or sys.argv[2] not in SHAPES:
        sys.exit(__doc__)
    make(SHAPES[sys.argv[2]], sys.argv[3])

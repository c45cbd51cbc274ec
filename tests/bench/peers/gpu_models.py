"""The models of the GPU benchmarks as one would write them in PyTorch for speed, and their random weights.

    gpu_models.py make SHAPE FOLDER     writes random bf16 weights as a Hugging Face directory

Llama: fused qkv and gate_up, grouped queries, F.rms_norm, scaled_dot_product_attention. GPT-2: the usual, tanh GELU, tied head.
"""
import json
import pathlib
import sys

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from gpu_shapes import SHAPES, config_of


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class LlamaLayer(torch.nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        width, head = shape["width"], shape["width"] // shape["heads"]
        self.input_norm = torch.nn.Parameter(torch.ones(width))
        self.post_norm = torch.nn.Parameter(torch.ones(width))
        self.qkv = torch.nn.Linear(width, head * (shape["heads"] + 2 * shape["kv_heads"]), bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)
        self.gate_up = torch.nn.Linear(width, 2 * shape["ffn"], bias=False)
        self.down = torch.nn.Linear(shape["ffn"], width, bias=False)

    def forward(self, x, cos, sin):
        batch, length, width = x.shape
        heads, kv_heads, eps = self.shape["heads"], self.shape["kv_heads"], self.shape["eps"]
        h = self.qkv(F.rms_norm(x, (width,), self.input_norm, eps)).view(batch, length, heads + 2 * kv_heads, -1).transpose(1, 2)
        q, k, v = h.split((heads, kv_heads, kv_heads), dim=1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
        x = x + self.out(h.transpose(1, 2).reshape(batch, length, width))
        gate, up = self.gate_up(F.rms_norm(x, (width,), self.post_norm, eps)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Llama(torch.nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        self.embedding = torch.nn.Embedding(shape["vocabulary"], shape["width"])
        self.layers = torch.nn.ModuleList(LlamaLayer(shape) for _ in range(shape["layers"]))
        self.norm = torch.nn.Parameter(torch.ones(shape["width"]))
        self.head = torch.nn.Linear(shape["width"], shape["vocabulary"], bias=False)

    def prepare(self, device, dtype):
        """Tables that are computed, not trained; made in fp64."""
        size = self.shape["width"] // self.shape["heads"]
        frequency = self.shape["theta"] ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        angle = torch.outer(torch.arange(self.shape["tokens"], dtype=torch.float64), frequency)
        self.cos, self.sin = angle.cos().to(device, dtype), angle.sin().to(device, dtype)

    def forward(self, ids, targets):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, self.cos.to(x.dtype), self.sin.to(x.dtype))
        logits = self.head(F.rms_norm(x, (x.shape[-1],), self.norm, self.shape["eps"]))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.reshape(-1))

    def load(self, tensors):
        with torch.no_grad():
            self.embedding.weight.copy_(tensors["model.embed_tokens.weight"])
            self.norm.copy_(tensors["model.norm.weight"])
            self.head.weight.copy_(tensors["lm_head.weight"])
            for i, layer in enumerate(self.layers):
                at = f"model.layers.{i}."
                layer.input_norm.copy_(tensors[at + "input_layernorm.weight"])
                layer.post_norm.copy_(tensors[at + "post_attention_layernorm.weight"])
                layer.qkv.weight.copy_(torch.cat([tensors[at + f"self_attn.{n}_proj.weight"] for n in "qkv"]))
                layer.out.weight.copy_(tensors[at + "self_attn.o_proj.weight"])
                layer.gate_up.weight.copy_(torch.cat([tensors[at + f"mlp.{n}_proj.weight"] for n in ("gate", "up")]))
                layer.down.weight.copy_(tensors[at + "mlp.down_proj.weight"])


class Gpt2Layer(torch.nn.Module):
    def __init__(self, shape):
        super().__init__()
        width = shape["width"]
        self.heads = shape["heads"]
        self.ln_1, self.ln_2 = torch.nn.LayerNorm(width, eps=shape["eps"]), torch.nn.LayerNorm(width, eps=shape["eps"])
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, shape["ffn"]), torch.nn.Linear(shape["ffn"], width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.ln_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(h.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class Gpt2(torch.nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        self.embedding = torch.nn.Embedding(shape["vocabulary"], shape["width"])
        self.positions = torch.nn.Embedding(shape["tokens"], shape["width"])
        self.layers = torch.nn.ModuleList(Gpt2Layer(shape) for _ in range(shape["layers"]))
        self.norm = torch.nn.LayerNorm(shape["width"], eps=shape["eps"])

    def prepare(self, device, dtype):
        pass

    def forward(self, ids, targets):
        x = self.embedding(ids) + self.positions.weight[:ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.reshape(-1))

    def load(self, tensors):
        with torch.no_grad():
            self.embedding.weight.copy_(tensors["wte.weight"])
            self.positions.weight.copy_(tensors["wpe.weight"])
            copy = lambda module, name, flip=False: (  # noqa: E731
                module.weight.copy_(tensors[name + ".weight"].T if flip else tensors[name + ".weight"]), module.bias.copy_(tensors[name + ".bias"]))
            copy(self.norm, "ln_f")
            for i, layer in enumerate(self.layers):
                copy(layer.ln_1, f"h.{i}.ln_1")
                copy(layer.ln_2, f"h.{i}.ln_2")
                for module, name in ((layer.qkv, "attn.c_attn"), (layer.out, "attn.c_proj"), (layer.up, "mlp.c_fc"), (layer.down, "mlp.c_proj")):
                    copy(module, f"h.{i}.{name}", flip=True)  # stored [in, out]


def build(shape):
    return Llama(shape) if shape["kind"] == "llama" else Gpt2(shape)


def load(model, folder):
    model.load(load_file(pathlib.Path(folder) / "model.safetensors"))


def llama_tensors(shape, matrix):
    width, ffn, vocabulary, head = shape["width"], shape["ffn"], shape["vocabulary"], shape["width"] // shape["heads"]
    one = torch.ones(width, dtype=torch.bfloat16)
    tensors = {"model.embed_tokens.weight": matrix(vocabulary, width), "model.norm.weight": one.clone(), "lm_head.weight": matrix(vocabulary, width)}
    for i in range(shape["layers"]):
        at = f"model.layers.{i}."
        rows = {"q": head * shape["heads"], "k": head * shape["kv_heads"], "v": head * shape["kv_heads"], "o": width}
        tensors |= {at + f"self_attn.{n}_proj.weight": matrix(rows[n], width) for n in "qkvo"}
        tensors |= {at + "mlp.gate_proj.weight": matrix(ffn, width), at + "mlp.up_proj.weight": matrix(ffn, width),
                    at + "mlp.down_proj.weight": matrix(width, ffn), at + "input_layernorm.weight": one.clone(),
                    at + "post_attention_layernorm.weight": one.clone()}
    return tensors


def gpt2_tensors(shape, matrix):
    width, ffn = shape["width"], shape["ffn"]
    one, zero = (lambda n: torch.ones(n, dtype=torch.bfloat16)), (lambda n: torch.zeros(n, dtype=torch.bfloat16))
    tensors = {"wte.weight": matrix(shape["vocabulary"], width), "wpe.weight": matrix(shape["tokens"], width), "ln_f.weight": one(width), "ln_f.bias": zero(width)}
    for i in range(shape["layers"]):
        for norm in ("ln_1", "ln_2"):
            tensors |= {f"h.{i}.{norm}.weight": one(width), f"h.{i}.{norm}.bias": zero(width)}
        for name, into, out in (("attn.c_attn", width, 3 * width), ("attn.c_proj", width, width), ("mlp.c_fc", width, ffn), ("mlp.c_proj", ffn, width)):
            tensors |= {f"h.{i}.{name}.weight": matrix(into, out), f"h.{i}.{name}.bias": zero(out)}
    return tensors


def make(shape, folder):
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(1)
    matrix = lambda rows, columns: (torch.randn(rows, columns, generator=generator, device=device) * 0.02).bfloat16().cpu()  # noqa: E731
    tensors = (llama_tensors if shape["kind"] == "llama" else gpt2_tensors)(shape, matrix)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_of(shape)))


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] != "make" or sys.argv[2] not in SHAPES:
        sys.exit(__doc__)
    make(SHAPES[sys.argv[2]], sys.argv[3])

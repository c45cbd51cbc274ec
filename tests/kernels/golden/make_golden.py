#!/usr/bin/env python3
"""Golden values of the ops, from PyTorch in float64: writes golden.txt beside this script.

    python3 make_golden.py        (needs torch; tested with 2.x on CPU)

One tensor a line: case, name, element count, then fp32 bit patterns in hex. Inputs are exact in fp32; results
are computed in float64 and rounded once.
"""
import pathlib

import torch
import torch.nn.functional as functional

torch.manual_seed(1234)
torch.set_num_threads(1)
LINES = []


def real(*shape, grad=True):
    value = torch.randn(*shape, dtype=torch.float32).to(torch.float64)
    return value.requires_grad_(grad)


def record(case, **tensors):
    for name, tensor in tensors.items():
        flat = tensor.detach().reshape(-1)
        flat = flat.to(torch.int32) if flat.dtype == torch.int64 else flat.to(torch.float32).view(torch.int32)
        words = " ".join(f"{word & 0xFFFFFFFF:08x}" for word in flat.tolist())
        LINES.append(f"{case} {name} {flat.numel()} {words}")


def rms_norm(x, w, epsilon):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * w


def norm_case():
    x, residual, w = real(6, 37), real(6, 37), real(37)
    total = x + residual
    y = rms_norm(total, w, 1e-5)
    dy, dsum = real(6, 37, grad=False), real(6, 37, grad=False)
    ((y * dy).sum() + (total * dsum).sum()).backward()
    record("norm", x=x, residual=residual, w=w, y=y, sum=total, dy=dy, dsum=dsum, dx=x.grad, dw=w.grad)


def swiglu_case():
    gate, up = real(5, 29), real(5, 29)
    y = functional.silu(gate) * up
    dy = real(5, 29, grad=False)
    (y * dy).sum().backward()
    record("swiglu", gate=gate, up=up, y=y, dy=dy, dgate=gate.grad, dup=up.grad)


def rotate_half(x):
    low, high = x.chunk(2, dim=-1)
    return torch.cat((-high, low), dim=-1)


def rope_case():
    # Two sequences of 7 tokens, 3 heads of 10, as in Hugging Face's Llama.
    sequence, heads, size = 7, 3, 10
    inverse = (1.0 / 10000.0 ** (torch.arange(0, size, 2).double() / size)).float()
    x = real(2, sequence, heads, size)
    angle = torch.outer(torch.arange(sequence).double(), inverse.double())
    angle = torch.cat((angle, angle), dim=-1)[None, :, None, :]
    y = x * angle.cos() + rotate_half(x) * angle.sin()
    dy = real(2, sequence, heads, size, grad=False)
    (y * dy).sum().backward()
    record("rope", inverse_frequency=inverse, x=x, y=y, dy=dy, dx=x.grad)


def attention_case():
    # One sequence of 50 tokens, 4 query heads on 2 kv heads of 8.
    batch, sequence, heads, kv_heads, size = 1, 50, 4, 2, 8
    q = real(batch, sequence, heads, size)
    k = real(batch, sequence, kv_heads, size)
    v = real(batch, sequence, kv_heads, size)
    group = heads // kv_heads
    many_k = k.transpose(1, 2).repeat_interleave(group, dim=1)
    many_v = v.transpose(1, 2).repeat_interleave(group, dim=1)
    out = functional.scaled_dot_product_attention(q.transpose(1, 2), many_k, many_v, is_causal=True)
    out = out.transpose(1, 2)
    dout = real(batch, sequence, heads, size, grad=False)
    (out * dout).sum().backward()
    record("attention", q=q, k=k, v=v, out=out, dout=dout, dq=q.grad, dk=k.grad, dv=v.grad)


def embedding_case():
    ids = torch.randint(0, 9, (14,))
    table = real(9, 11)
    out = functional.embedding(ids, table)
    dout = real(14, 11, grad=False)
    (out * dout).sum().backward()
    record("embedding", ids=ids, table=table, out=out, dout=dout, dtable=table.grad)


def head_case():
    x, w = real(13, 10), real(23, 10)
    targets = torch.randint(0, 23, (13,))
    targets[4] = -1
    loss = functional.cross_entropy(x @ w.T, targets, ignore_index=-1, reduction="none")
    loss.sum().backward()
    record("head", x=x, w=w, targets=targets, loss=loss, dx=x.grad, dw=w.grad)


def adamw_case():
    p = torch.nn.Parameter(torch.randn(19, dtype=torch.float32).to(torch.float64))
    record("adamw", p0=p)
    optimizer = torch.optim.AdamW([p], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(1, 6):
        p.grad = torch.randn(19, dtype=torch.float32).to(torch.float64)
        record("adamw", **{f"g{step}": p.grad})
        optimizer.step()
    state = optimizer.state[p]
    record("adamw", p=p, m=state["exp_avg"], v=state["exp_avg_sq"])


def layer_norm_case():
    x, w, b = real(6, 37), real(37), real(37)
    y = functional.layer_norm(x, (37,), w, b, 1e-5)
    dy = real(6, 37, grad=False)
    (y * dy).sum().backward()
    record("layer_norm", x=x, w=w, b=b, y=y, dy=dy, dx=x.grad, dw=w.grad, db=b.grad)


def head_norm_case():
    # 5 tokens, 3 heads of 10, one weight: Qwen3's q_norm.
    x, w = real(5, 3, 10), real(10)
    y = rms_norm(x, w, 1e-6)
    dy = real(5, 3, 10, grad=False)
    (y * dy).sum().backward()
    record("head_norm", x=x, w=w, y=y, dy=dy, dx=x.grad, dw=w.grad)


def gelu_case():
    # From far below zero to far above.
    x = torch.cat((torch.randn(128) * 2, torch.linspace(-40, 40, 17))).reshape(5, 29).double().requires_grad_()
    y = functional.gelu(x, approximate="tanh")
    dy = real(5, 29, grad=False)
    (y * dy).sum().backward()
    record("gelu", x=x, y=y, dy=dy, dx=x.grad)


def positions_case():
    # Two sequences of 7 tokens, a table of 9 positions.
    x, table = real(14, 11), real(9, 11)
    y = x + table[:7].repeat(2, 1)
    dy = real(14, 11, grad=False)
    (y * dy).sum().backward()
    record("positions", x=x, table=table, y=y, dy=dy, dtable=table.grad)


def main():
    for case in (norm_case, swiglu_case, rope_case, attention_case, embedding_case, head_case, adamw_case,
                 layer_norm_case, head_norm_case, gelu_case, positions_case):
        case()
    path = pathlib.Path(__file__).with_name("golden.txt")
    path.write_text("\n".join(LINES) + "\n")
    print(f"{path.name}: {len(LINES)} tensors, {path.stat().st_size} bytes, torch {torch.__version__}")


if __name__ == "__main__":
    main()

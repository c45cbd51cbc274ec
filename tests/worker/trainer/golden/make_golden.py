#!/usr/bin/env python3
"""Writes loss_curves.txt: training runs of small models by transformers and torch.optim (CPU, fp32, one thread); with --bf16
loss_curves_bf16.txt: a bf16 copy of fp32 weights goes forward and backward, its gradients are widened, norm and update are fp32;
with --fp16 loss_curves_fp16.txt: the same in fp16 with torch's GradScaler;
with --cut loss_curves_cut.txt: of models that a tensor axis of 4 divides;
with --sgd loss_curves_sgd.txt: torch.optim.SGD with momentum, and Nesterov's, at ten times the learning rate; with --lion
loss_curves_lion.txt: Lion, written here in torch, at a fifth of the learning rate. Names of cases: these alone.

Everything that both sides must share is a rule, written here a second time: initial weights (Philox, Box-Muller), the
token file (a formula), the order of samples (Feistel permutation), the learning rate, the layers that are left out. Needs torch, transformers, numpy:

    python tests/worker/trainer/golden/make_golden.py > tests/worker/trainer/golden/loss_curves.txt
    python tests/worker/trainer/golden/make_golden.py --bf16 > tests/worker/trainer/golden/loss_curves_bf16.txt
    python tests/worker/trainer/golden/make_golden.py --fp16 > tests/worker/trainer/golden/loss_curves_fp16.txt
    python tests/worker/trainer/golden/make_golden.py --cut > tests/worker/trainer/golden/loss_curves_cut.txt
    python tests/worker/trainer/golden/make_golden.py --sgd > tests/worker/trainer/golden/loss_curves_sgd.txt
    python tests/worker/trainer/golden/make_golden.py --lion > tests/worker/trainer/golden/loss_curves_lion.txt
"""
import copy
import math
import sys

import numpy as np
import torch
import transformers

STEPS, WARMUP, MIN_RATIO, LR = 50, 5, 0.1, 1e-2
BETAS, EPS, DECAY, CLIP = (0.9, 0.95), 1e-8, 0.1, 1.0
MOMENTUM, SGD_LR_FACTOR = 0.9, 10
LION_BETAS, LION_LR_FACTOR = (0.9, 0.99), 0.2
GLOBAL_BATCH, SEED, INIT_STD, TOKENS = 8, 1234, 0.05, 4001

BASE = dict(model_type="llama", max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=10000.0, num_hidden_layers=2)
ODD = dict(BASE, vocab_size=61, hidden_size=30, intermediate_size=37, num_attention_heads=6, head_dim=6)
GPT2 = dict(model_type="gpt2", vocab_size=61, n_positions=64, n_embd=30, n_head=6, n_layer=2, n_inner=37,
            layer_norm_epsilon=1e-5, activation_function="gelu_new", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            bos_token_id=None, eos_token_id=None)
CASES = {
    # Odd sizes: no projection can be bundled, no shard boundary is where it would be convenient.
    "odd_tied": (17, dict(ODD, num_key_value_heads=2, tie_word_embeddings=True)),
    "odd_untied": (17, dict(ODD, num_key_value_heads=3, tie_word_embeddings=False)),
    # Sizes that bundle q|k|v and gate|up, and the frequency scaling of Llama 3.
    "bundled_rope_scaling": (48, dict(BASE, vocab_size=97, hidden_size=32, intermediate_size=64,
                                      num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                                      tie_word_embeddings=False,
                                      rope_scaling=dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0,
                                                        high_freq_factor=4.0,
                                                        original_max_position_embeddings=32))),
    "qwen2_tied": (17, dict(ODD, model_type="qwen2", num_key_value_heads=2, tie_word_embeddings=True)),
    "qwen2_untied": (17, dict(ODD, model_type="qwen2", num_key_value_heads=3, tie_word_embeddings=False)),
    "qwen3_tied": (17, dict(ODD, model_type="qwen3", num_key_value_heads=2, tie_word_embeddings=True)),
    "qwen3_untied": (17, dict(ODD, model_type="qwen3", num_key_value_heads=3, tie_word_embeddings=False)),
    "gpt2_tied": (17, dict(GPT2, tie_word_embeddings=True)),
    "gpt2_untied": (17, dict(GPT2, tie_word_embeddings=False)),
    # Every layer runs twice in a row.
    "shared_layers": (17, dict(ODD, num_key_value_heads=2, tie_word_embeddings=True, layer_sharing=True)),
    "layer_drop": (17, dict(ODD, num_hidden_layers=4, num_key_value_heads=3, tie_word_embeddings=False)),
}
# Four heads; of tied models two key heads, which two ranks of four then share.
CUT = dict(BASE, vocab_size=61, hidden_size=32, intermediate_size=48, num_attention_heads=4, head_dim=6)
CUT_CASES = {
    f"cut_{family}_{'tied' if tied else 'untied'}":
        (16, dict(CUT, model_type=family, num_key_value_heads=2 if tied else 4, tie_word_embeddings=tied))
    for family in ("llama", "qwen2", "qwen3") for tied in (True, False)
}
for tied in (True, False):
    CUT_CASES[f"cut_gpt2_{'tied' if tied else 'untied'}"] = (
        16, dict(GPT2, n_embd=32, n_head=4, n_inner=48, tie_word_embeddings=tied))
LAYER_DROP = {"layer_drop": 0.3}
MASK = 0xFFFFFFFF


def philox(key, counter):
    """Philox4x32-10 on arrays: counter is four uint64 arrays that hold 32-bit words."""
    k0, k1 = key & MASK, key >> 32
    c = [np.asarray(word, dtype=np.uint64) for word in counter]
    for _ in range(10):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        low, high = np.uint64(MASK), np.uint64(32)
        c = [(p1 >> high) ^ c[1] ^ np.uint64(k0), p1 & low, (p0 >> high) ^ c[3] ^ np.uint64(k1), p0 & low]
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c


def initial_normal(shape, site, scale):
    count = int(np.prod(shape))
    blocks = np.arange((count + 3) // 4, dtype=np.uint64)
    zero = np.zeros_like(blocks)
    words = [w.astype(np.float64) for w in philox(SEED, (blocks, zero, zero, zero + np.uint64(site)))]
    values = []
    for radius_bits, angle_bits in ((words[0], words[1]), (words[2], words[3])):
        radius = np.sqrt(-2.0 * np.log((radius_bits + 0.5) * 2.0**-32))
        angle = 2.0 * math.pi * angle_bits * 2.0**-32
        values += [radius * np.cos(angle), radius * np.sin(angle)]
    deviation = float(np.float32(INIT_STD * scale))
    flat = np.stack(values, axis=1).reshape(-1)[:count] * deviation
    return torch.from_numpy(flat.astype(np.float32).reshape(shape))


def token_file(vocabulary):
    """A walk that is mostly predictable: x -> 5x + 7, and every seventh or eleventh step something else."""
    ids, x = [], 3
    for i in range(TOKENS):
        ids.append(x)
        x = (5 * x + 7 + (i if i % 7 == 0 else 0) + (3 * i if i % 11 == 0 else 0)) % vocabulary
    return np.array(ids)


def permuted(size, position, pass_number):
    bits = (size - 1).bit_length()
    half = (bits + 1) // 2
    mask = (1 << half) - 1
    value = position
    while True:
        left, right = value >> half, value & mask
        for round_number in range(6):
            draw = int(philox(SEED, (right, pass_number, 0, round_number | (5 << 24)))[0])
            left, right = right, left ^ (draw & mask)
        value = (left << half) | right
        if value < size:
            return value


def samples_of_step(size, step):
    positions = range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)
    return [permuted(size, p % size, p // size) for p in positions]


def learning_rate(step):
    if step < WARMUP:
        return LR * (step + 1) / WARMUP
    x = (step + 1 - WARMUP) / (STEPS - WARMUP)
    return LR * (MIN_RATIO + (1 - MIN_RATIO) * 0.5 * (1 + math.cos(math.pi * x)))


def make_model(config):
    config = transformers.AutoConfig.for_model(**config, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.float32)
    named = dict(model.named_parameters())
    for site, name in enumerate(sorted(named)):
        with torch.no_grad():
            if named[name].dim() == 1:
                named[name].fill_(0.0 if name.endswith(".bias") else 1.0)
                continue
            # GPT-2: projections onto the residual stream start smaller.
            residual = config.model_type == "gpt2" and name.endswith("c_proj.weight")
            scale = 1.0 / math.sqrt(2.0 * config.num_hidden_layers) if residual else 1.0
            named[name].copy_(initial_normal(tuple(named[name].shape), site, scale))
    return model, named


def change_layers(model, left_out):
    """Layers run twice where the configuration shares them; those whose index is in `left_out` do nothing."""

    def changed(index, layer_forward, calls):
        def forward(hidden, **others):
            for _ in range(0 if index in left_out else calls):
                hidden = layer_forward(hidden, **others)
            return hidden

        return forward

    calls = 2 if getattr(model.config, "layer_sharing", False) else 1
    for index, layer in enumerate(model.model.layers if hasattr(model, "model") else []):
        layer.forward = changed(index, layer.forward, calls)


def layers_left_out(probability, step, lane, layers):
    """Of the only micro-batch of a lane."""
    return [layer for layer in range(layers)
            if int(philox(SEED, (step, lane, 0, layer | (7 << 24)))[0]) < int(probability * 2**32)]


def step_of(model, batch, vocabulary, scaler, left_out_of_lane=None, left_out=None):
    """Loss; gradients, times the scale of `scaler`, are left in the model. A lane is one sequence; `left_out` is what
    change_layers was given."""
    model.zero_grad()
    total = 0.0
    lanes = [batch] if left_out_of_lane is None else [batch[lane:lane + 1] for lane in range(len(batch))]
    for lane, rows in enumerate(lanes):
        if left_out_of_lane is not None:
            left_out[:] = left_out_of_lane(lane)
        logits = model(rows[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().reshape(-1, vocabulary), rows[:, 1:].reshape(-1))
        scaler.scale(loss / len(lanes)).backward()
        total += loss.item() / len(lanes)
    return total


class DecoupledSgd(torch.optim.SGD):
    """torch's SGD, whose own weight decay would go through the momentum: here it is decoupled, as AdamW's is."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(1 - group["lr"] * group["decoupled"])
        super().step()


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, algorithm 2, with decay in the same step. PyTorch has none."""

    def __init__(self, groups, lr):
        super().__init__(groups, dict(lr=lr))

    @torch.no_grad()
    def step(self):
        beta1, beta2 = LION_BETAS
        for group in self.param_groups:
            for parameter in group["params"]:
                average = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                update = (beta1 * average + (1 - beta1) * parameter.grad).sign()
                parameter.sub_(group["lr"] * (update + group["decoupled"] * parameter))
                average.mul_(beta2).add_(parameter.grad, alpha=1 - beta2)


def make_optimizer(named, nesterov):
    matrices = [p for p in named.values() if p.dim() > 1]
    vectors = [p for p in named.values() if p.dim() == 1]
    if nesterov is None:
        return torch.optim.AdamW([dict(params=matrices, weight_decay=DECAY), dict(params=vectors, weight_decay=0.0)],
                                 lr=LR, betas=BETAS, eps=EPS)
    if nesterov == "lion":
        return Lion([dict(params=matrices, decoupled=DECAY), dict(params=vectors, decoupled=0.0)], lr=LR)
    return DecoupledSgd([dict(params=matrices, decoupled=DECAY), dict(params=vectors, decoupled=0.0)],
                        lr=LR, momentum=MOMENTUM, nesterov=nesterov)


def train(name, length, config, narrow, nesterov=None):
    """narrow: type of weights and activations; None: fp32. nesterov: of SGD, or "lion"; None: AdamW."""
    model, named = make_model(config)
    copy_of_model = model if narrow is None else copy.deepcopy(model).to(narrow)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, enabled=narrow == torch.float16)
    left_out = []
    change_layers(copy_of_model, left_out)
    drop = LAYER_DROP.get(name)
    optimizer = make_optimizer(named, nesterov)
    factor = {None: 1, "lion": LION_LR_FACTOR}.get(nesterov, SGD_LR_FACTOR)
    suffix = {torch.bfloat16: "_bf16", torch.float16: "_fp16"}.get(narrow) or {None: "", False: "_sgd", True: "_sgd_nesterov", "lion": "_lion"}[nesterov]
    tokens = token_file(config["vocab_size"])
    size = (len(tokens) - 1) // length
    for step in range(STEPS):
        rows = np.stack([tokens[i * length:i * length + length + 1] for i in samples_of_step(size, step)])
        of_lane = drop and (lambda lane: layers_left_out(drop, step, lane, config["num_hidden_layers"]))
        loss = step_of(copy_of_model, torch.from_numpy(rows), config["vocab_size"], scaler, of_lane, left_out)
        for wide, used in zip(model.parameters(), copy_of_model.parameters()):
            wide.grad = (torch.zeros_like(used) if used.grad is None else used.grad).float()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = factor * learning_rate(step)
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            for wide, used in zip(model.parameters(), copy_of_model.parameters()):
                used.copy_(wide)
        print(name + suffix, step, f"{loss:.9g}", f"{norm.item():.9g}", f"{factor * learning_rate(step):.9g}")


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    print(f"# case step loss grad_norm lr; torch {torch.__version__}, transformers {transformers.__version__}")
    if "--sgd" in sys.argv[1:] or "--lion" in sys.argv[1:]:
        for nesterov in (False, True) if "--sgd" in sys.argv[1:] else ("lion",):
            length, config = CASES["bundled_rope_scaling"]
            train("bundled_rope_scaling", length, config, None, nesterov)
        return 0
    narrow = {"--bf16": torch.bfloat16, "--fp16": torch.float16}.get(next(iter(set(sys.argv[1:]) & {"--bf16", "--fp16"}), None))
    named = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    for name, (length, config) in (CUT_CASES if "--cut" in sys.argv[1:] else CASES).items():
        if not named or name in named:
            train(name, length, config, narrow)
    return 0


if __name__ == "__main__":
    sys.exit(main())

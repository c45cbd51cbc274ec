#!/usr/bin/env python3
"""A random model (Llama, Qwen2, Qwen3, GPT-2) saved by transformers is trained by Ravel, exported, and loaded by transformers again: losses along the
way and the final logits are those of the same training in PyTorch, to 1e-4. Needs the environment of setup.sh.
"""
import math
import pathlib
import sys
import tempfile
import unittest

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "testing"))
import cluster  # noqa: E402

STEPS, WARMUP, LR, MIN_RATIO = 20, 5, 3e-3, 0.1
BETAS, EPS, DECAY, CLIP = (0.9, 0.95), 1e-8, 0.1, 1.0
SEQUENCE, BATCH, VOCABULARY = 23, 8, 131
TOLERANCE = 1e-4


LLAMA = dict(hidden_size=60, intermediate_size=77, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
             max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=5000.0)
CONFIGS = {
    "llama": LLAMA,
    "qwen2": LLAMA,
    "qwen3": dict(LLAMA, head_dim=14),
    "gpt2": dict(n_embd=60, n_inner=77, n_layer=3, n_head=6, n_positions=64, layer_norm_epsilon=1e-5),
}


def save_random_model(folder, family, tied, sharded, bare=False):
    torch.manual_seed(11)
    config = AutoConfig.for_model(family, **CONFIGS[family], vocab_size=VOCABULARY, tie_word_embeddings=tied,
                                  bos_token_id=None, eos_token_id=None)
    model = AutoModelForCausalLM.from_config(config).float().eval()  # GPT-2's dropout is not applied
    with torch.no_grad():  # vectors of ones and zeros would hide one that is not applied
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(0.1 * torch.randn_like(weight))
    if bare:  # as the published gpt2: no head, no prefix
        model.transformer.save_pretrained(folder)
    else:
        model.save_pretrained(folder, max_shard_size="100KB" if sharded else "1GB")
    return model


def write_tokens(path):
    random = np.random.default_rng(5)
    ids = np.zeros(20000, dtype=np.uint16)
    for i in range(1, len(ids)):
        ids[i] = (ids[i - 1] * 5 + 3) % VOCABULARY if random.random() < 0.75 else random.integers(VOCABULARY)
    ids.tofile(path)


def job_text(name, model, tokens, store):
    return f"""
apiVersion: ravel/v1
kind: TrainingJob
metadata: {{name: {name}}}
spec:
  model: {{from: "{model}"}}
  data: {{train: [{{path: "{tokens}"}}], format: flat_u16, sequenceLength: {SEQUENCE}}}
  training:
    steps: {STEPS}
    globalBatch: {BATCH}
    seed: 3
    optimizer: {{lr: {LR}, betas: [{BETAS[0]}, {BETAS[1]}], eps: {EPS}, weightDecay: {DECAY}, clipNorm: {CLIP}}}
    schedule: {{kind: cosine, warmupSteps: {WARMUP}, minRatio: {MIN_RATIO}}}
  devices: {{kind: cpu, count: 2}}
  determinism: {{mode: exact, virtualRanks: 4}}
  checkpoint: {{store: "file://{store}", everySteps: {STEPS}}}
"""


def learning_rate(step):
    """Of step `step`, from 0: linear warm-up to the peak, then half a cosine down to MIN_RATIO at the last step."""
    if step < WARMUP:
        return LR * (step + 1) / WARMUP
    done = (step + 1 - WARMUP) / (STEPS - WARMUP)
    return LR * (MIN_RATIO + (1 - MIN_RATIO) * 0.5 * (1 + math.cos(math.pi * done)))


def train_in_torch(model, batches):
    """Losses of the same training in plain PyTorch; changes the model."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}],
                                  lr=LR, betas=BETAS, eps=EPS)
    losses = []
    for step, samples in enumerate(batches):
        ids = torch.tensor(samples)
        logits = model(input_ids=ids[:, :-1]).logits.float()
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        optimizer.step()
        losses.append(loss.item())
    return losses


class RoundTripTest(unittest.TestCase):
    def round_trip(self, family, tied, sharded=False, bare=False):
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as scratch:
            folder = pathlib.Path(scratch)
            model = save_random_model(folder / "model", family, tied, sharded, bare)
            self.assertEqual((folder / "model" / "model.safetensors.index.json").exists(), sharded)
            write_tokens(folder / "tokens.bin")
            job = folder / "job.yaml"
            job.write_text(job_text("roundtrip", folder / "model", folder / "tokens.bin", folder / "store"))
            with cluster.Cluster(folder / "cluster", workers=2) as ravel:
                history = ravel.train(job, "roundtrip")
                ravel.ctl("checkpoints", "export", ravel.checkpoints("roundtrip")[STEPS], "--format", "huggingface",
                          "--output", folder / "exported")
            batches = [cluster.batch(job, step) for step in range(STEPS)]
            self.compare(history, train_in_torch(model, batches), model, folder / "exported", tied)

    def compare(self, history, expected, model, exported, tied):
        self.assertEqual(len(history), STEPS)
        worst = 0.0
        for step, (row, loss) in enumerate(zip(history, expected)):
            self.assertAlmostEqual(row["lr"], learning_rate(step), delta=1e-9)
            worst = max(worst, abs(row["loss"] - loss) / loss)
        self.assertLess(expected[-1], expected[0])
        again = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
        self.assertEqual(again.config.tie_word_embeddings, tied)
        ids = torch.tensor(np.random.default_rng(1).integers(VOCABULARY, size=(4, SEQUENCE)))
        with torch.no_grad():
            ours, theirs = again(input_ids=ids).logits, model(input_ids=ids).logits
        difference = (ours - theirs).abs().max().item() / theirs.abs().max().item()
        print(f"{again.config.model_type} tied={tied}: losses differ by at most {worst:.1e}, logits by {difference:.1e}")
        self.assertLess(worst, TOLERANCE)
        self.assertLess(difference, TOLERANCE)

    def test_untied_head_in_one_file(self):
        self.round_trip("llama", tied=False)

    def test_tied_head_in_several_files(self):
        self.round_trip("llama", tied=True, sharded=True)

    def test_qwen2(self):
        self.round_trip("qwen2", tied=False)

    def test_qwen2_tied_in_several_files(self):
        self.round_trip("qwen2", tied=True, sharded=True)

    def test_qwen3(self):
        self.round_trip("qwen3", tied=False, sharded=True)

    def test_qwen3_tied(self):
        self.round_trip("qwen3", tied=True)

    def test_gpt2_tied(self):
        self.round_trip("gpt2", tied=True)

    def test_gpt2_without_a_head_in_its_file(self):
        self.round_trip("gpt2", tied=True, bare=True)

    def test_gpt2_untied_in_several_files(self):
        self.round_trip("gpt2", tied=False, sharded=True)


if __name__ == "__main__":
    unittest.main()

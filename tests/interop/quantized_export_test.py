#!/usr/bin/env python3
"""transformers opens exports of codes (fp8_block, fp8_tensor, mxfp8): every matrix is code x scale as the files have them, to the bit, and
logits follow those of the fp32 export. It does not load nvfp4 yet, and says so. Needs the environment of setup.sh.
"""
import pathlib
import sys
import tempfile
import unittest

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "testing"))
import cluster  # noqa: E402
import tiny_job  # noqa: E402

STEPS = 4
# Whole blocks of 128 in every matrix; bias-free, as layers of codes are.
MODEL = {"modelType": "llama", "vocabSize": tiny_job.VOCABULARY, "hiddenSize": 128, "intermediateSize": 256, "numHiddenLayers": 2,
         "numAttentionHeads": 4, "numKeyValueHeads": 4, "maxPositionEmbeddings": tiny_job.SEQUENCE_TOKENS}


def decoded(tensors, name):
    """Code x scale: of the tensor, of 128 x 128, or E8M0 of 1 x 32."""
    weight, scale = tensors[name].float(), tensors[name + "_scale_inv"]
    if scale.dtype == torch.uint8:
        scale = torch.exp2(scale.float() - 127)
    if scale.dim() == 2:
        for axis in (0, 1):
            scale = scale.repeat_interleave(weight.shape[axis] // scale.shape[axis], axis)
    return weight * scale


class QuantizedExport(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.scratch = tempfile.TemporaryDirectory()
        cls.folder = pathlib.Path(cls.scratch.name)
        tiny_job.write_tokens(cls.folder)
        cls.ravel = cluster.Cluster(cls.folder / "cluster", workers=1)
        cls.ravel.__enter__()

    @classmethod
    def tearDownClass(cls):
        cls.ravel.__exit__(None, None, None)
        cls.scratch.cleanup()

    def exports(self, name, precision):
        """Folders of the codes and of fp32 of a job's last step."""
        job = tiny_job.write_job(self.folder, name, "cpu", STEPS, save_every=STEPS, model={"config": MODEL},
                                 precision={"compute": "bf16", **precision})
        self.ravel.train(job, name)
        step = self.ravel.job(name)["committedPath"]
        for kind in ("--quantized", "--dtype=f32"):
            self.ravel.ctl("checkpoints", "export", step, "--output", str(self.folder / f"{name}{kind}"), kind)
        return self.folder / f"{name}--quantized", self.folder / f"{name}--dtype=f32"

    def check(self, name, precision):
        codes, plain = self.exports(name, precision)
        model, info = AutoModelForCausalLM.from_pretrained(codes, quantization_config=FineGrainedFP8Config(dequantize=True),
                                                           dtype=torch.float32, output_loading_info=True)
        self.assertFalse(info["missing_keys"] or info["mismatched_keys"], info)
        tensors = {k: v for file in codes.glob("*.safetensors") for k, v in load_file(file).items()}
        state = model.state_dict()
        matrices = [k for k in tensors if k + "_scale_inv" in tensors]
        self.assertEqual(len(matrices), 14)
        for key in matrices:
            self.assertTrue(torch.equal(state[key].float(), decoded(tensors, key)), key)
        ids = torch.arange(1, 1 + tiny_job.SEQUENCE_TOKENS)[None]
        with torch.no_grad():
            ours = model(ids).logits
            exact = AutoModelForCausalLM.from_pretrained(plain).float()(ids).logits
        error = (ours - exact).norm() / exact.norm()
        self.assertLess(error, 0.1)  # codes have 3 bits of mantissa: 2^-4 of each value at most
        print(f"{name}: {len(matrices)} matrices are code x scale; logits are {error:.4f} from those of fp32")

    def test_blocks(self):
        self.check("blocks", {"recipe": "fp8_block"})

    def test_one_scale_for_the_tensor(self):
        self.check("tensor", {"recipe": "fp8_tensor", "scaling": "current"})

    def test_rows_of_blocks(self):
        self.check("rows", {"recipe": "mxfp8"})

    def test_nvfp4_is_refused_by_name(self):
        codes, _ = self.exports("fp4", {"recipe": "nvfp4"})
        with self.assertRaisesRegex(ValueError, "NVFP4"):
            AutoModelForCausalLM.from_pretrained(codes)


if __name__ == "__main__":
    unittest.main()

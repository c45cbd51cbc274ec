"""Step times of one model on one CPU worker in fp32, in bf16, and in bf16 with its narrowest states, twice each in one run, with the
memory that was planned and measured. Needs built programs (RAVEL_BIN_DIR or a usual build). `taskset -c 0` keeps it on one core."""
import pathlib
import statistics
import struct
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "testing"))
import cluster  # noqa: E402
import tiny_job  # noqa: E402

STEPS = 10
WARMUP_STEPS = 2
SEQUENCE_TOKENS = 256
VOCABULARY = 4096
MODEL = {"modelType": "llama", "vocabSize": VOCABULARY, "hiddenSize": 512, "intermediateSize": 1408, "numHiddenLayers": 4,
         "numAttentionHeads": 8, "numKeyValueHeads": 4, "maxPositionEmbeddings": SEQUENCE_TOKENS}
NARROW = {"mainWeights": "bf16_remainder", "stateDtype": "bf16"}
FORMS = {"fp32": ("fp32", {}), "bf16": ("bf16", {}), "narrow": ("bf16", NARROW)}


def train(ravel, folder, name, compute, states):
    """The history of one job."""
    job = tiny_job.write_job(
        folder, name, "cpu", STEPS, save_every=STEPS, model={"config": MODEL},
        data={"train": [{"path": f"{folder}/tokens.bin"}], "format": "flat_u16", "sequenceLength": SEQUENCE_TOKENS},
        training={"steps": STEPS, "globalBatch": 4, "optimizer": {"lr": 1e-3, **states}}, precision={"compute": compute})
    return ravel.train(job, name)


def main():
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        tokens = [7 * i % (VOCABULARY - 3) for i in range(20000)]
        (folder / "tokens.bin").write_bytes(struct.pack(f"<{len(tokens)}H", *tokens))
        with cluster.Cluster(folder / "cluster", workers=1) as ravel:
            for turn in range(2):
                for form, (compute, states) in FORMS.items():
                    rows = train(ravel, folder, f"{form}-{turn}", compute, states)
                    seconds = statistics.median(row["step_seconds"] for row in rows[WARMUP_STEPS:])
                    last = rows[-1]
                    print(f"{form:6} {1e3 * seconds:6.0f} ms per step, loss {last['loss']:.4f}, planned {last['planned_bytes'] >> 20} MiB,"
                          f" measured {last['measured_bytes'] >> 20} MiB", flush=True)


if __name__ == "__main__":
    main()

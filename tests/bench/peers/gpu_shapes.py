"""The models of the GPU benchmarks as numbers: both sides and the tests of their plans read them. Standard library only."""
# Sequences are per step, in `micro_batches` parts (1 where nothing is said). `states` is the type of the optimizer's moments: bf16 where fp32 does not fit one device. Shapes with
# the same `weights` are trained from the same directory; otherwise a shape has its own.
LLAMA = {"kind": "llama", "theta": 500000.0, "eps": 1e-5, "positions": 8192}
LLAMA_8B = {**LLAMA, "width": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocabulary": 128256, "states": "bf16", "weights": "8b"}
LLAMA_1B = {**LLAMA, "width": 2048, "layers": 24, "heads": 16, "kv_heads": 8, "ffn": 7168, "vocabulary": 128256, "tokens": 4096, "states": "fp32"}
SHAPES = {
    "8b-8k": {**LLAMA_8B, "sequences": 1, "tokens": 8192},
    "8b-4k": {**LLAMA_8B, "sequences": 2, "tokens": 4096},
    "3b": {**LLAMA, "width": 3072, "layers": 28, "heads": 24, "kv_heads": 8, "ffn": 8192, "vocabulary": 128256, "sequences": 32, "micro_batches": 8, "tokens": 4096, "states": "fp32"},
    "1.5b": {**LLAMA_1B, "sequences": 32, "micro_batches": 8},
    "1.5b-64k": {**LLAMA_1B, "sequences": 16, "micro_batches": 4},
    "1.5b-256k": {**LLAMA_1B, "sequences": 64, "micro_batches": 16},
    "124m": {"kind": "gpt2", "eps": 1e-5, "width": 768, "layers": 12, "heads": 12, "kv_heads": 12, "ffn": 3072, "vocabulary": 50304, "sequences": 64, "tokens": 1024, "states": "fp32"},
    "parity": {**LLAMA, "width": 512, "layers": 4, "heads": 8, "kv_heads": 4, "ffn": 1408, "vocabulary": 4096, "sequences": 4, "tokens": 256, "states": "fp32"},
    "tiny": {**LLAMA, "width": 128, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 352, "vocabulary": 512, "sequences": 4, "micro_batches": 2, "tokens": 64, "states": "fp32"},
    "tiny-gpt2": {"kind": "gpt2", "eps": 1e-5, "width": 128, "layers": 2, "heads": 4, "kv_heads": 4, "ffn": 512, "vocabulary": 512, "sequences": 2, "tokens": 64, "states": "fp32"},
}


def matrix_parameters(shape):
    """Parameters that take part in products: the head is in, the lookup of embeddings is not."""
    width, head = shape["width"], shape["width"] // shape["heads"]
    attention = width * head * (2 * shape["heads"] + 2 * shape["kv_heads"])
    mlp = width * shape["ffn"] * (3 if shape["kind"] == "llama" else 2)
    return shape["layers"] * (attention + mlp) + width * shape["vocabulary"]


def flops_per_token(shape):
    """Forward and backward; attention counted to the diagonal ("causal-half")."""
    return 6 * matrix_parameters(shape) + 6 * shape["layers"] * shape["width"] * shape["tokens"]


def config_of(shape):
    """config.json of a Hugging Face directory."""
    common = {"vocab_size": shape["vocabulary"], "torch_dtype": "bfloat16"}
    if shape["kind"] == "gpt2":
        return {**common, "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": shape["width"], "n_inner": shape["ffn"],
                "n_layer": shape["layers"], "n_head": shape["heads"], "n_positions": shape["tokens"], "layer_norm_epsilon": shape["eps"],
                "activation_function": "gelu_new", "tie_word_embeddings": True}
    return {**common, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": shape["width"], "intermediate_size": shape["ffn"],
            "num_hidden_layers": shape["layers"], "num_attention_heads": shape["heads"], "num_key_value_heads": shape["kv_heads"],
            "max_position_embeddings": shape["positions"], "rms_norm_eps": shape["eps"], "rope_theta": shape["theta"], "hidden_act": "silu",
            "tie_word_embeddings": False}


def inline_config(shape):
    """The same as `spec.model.config` of a job file, which needs no directory."""
    config = {"modelType": shape["kind"], "vocabSize": shape["vocabulary"], "hiddenSize": shape["width"], "intermediateSize": shape["ffn"],
              "numHiddenLayers": shape["layers"], "numAttentionHeads": shape["heads"]}
    if shape["kind"] == "gpt2":
        return {**config, "maxPositionEmbeddings": shape["tokens"], "layerNormEps": shape["eps"]}
    return {**config, "numKeyValueHeads": shape["kv_heads"], "maxPositionEmbeddings": shape["positions"], "rmsNormEps": shape["eps"],
            "ropeTheta": shape["theta"], "tieWordEmbeddings": False}

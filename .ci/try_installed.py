"""What a user does first after installing the wheel beside other tools; run in the environment that has it."""

import sys
import tempfile
from importlib import import_module, metadata
from pathlib import Path

import torch
import transformer_lens
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

import emergent_heads as eh


def small_model(seed: int) -> GPTNeoXForCausalLM:
    torch.manual_seed(seed)
    config = GPTNeoXConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    model = GPTNeoXForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, 0, 0.4)
    return model


def main(neighbour: str) -> None:
    assert Path(eh.__file__).is_relative_to(Path(sys.prefix)), f"tried {eh.__file__}, which is not the installed wheel"
    tokens = torch.randint(50, (8, 12), generator=torch.Generator().manual_seed(0))
    task = eh.tasks.from_tokens(tokens.numpy(), tokens[:, 0].numpy())
    pre, post = small_model(0), small_model(1)
    plain = eh.rank_heads(pre, post, task).top(8)

    bridge = build_bridge_from_module(small_model(0), "GPTNeoXForCausalLM", hf_config=pre.config)
    assert eh.rank_heads(bridge, post, task).top(8) == plain
    model = eh.SmallModel(eh.SmallModelConfig(n_layers=1, d_model=16, n_heads=2, vocabulary_size=8, context=8), seed=0)
    _, cache = model.run_with_cache(torch.zeros(1, 4, dtype=torch.long))
    assert isinstance(cache, transformer_lens.ActivationCache)

    if neighbour == "with-nnsight":
        nnsight = import_module("nnsight")
        assert eh.rank_heads(nnsight.NNsight(small_model(0)), post, task).top(8) == plain
    else:
        from_neighbour = import_module("sae_lens")
        config = from_neighbour.TopKTrainingSAEConfig(d_in=32, d_sae=64, k=4, device="cpu", dtype="float32")
        with tempfile.TemporaryDirectory() as folder:
            made = from_neighbour.TopKTrainingSAE(config)
            made.save_inference_model(folder)
            assert eh.sae.load(folder).encode(torch.randn(3, 32)).shape == (3, 64)
    versions = {name: metadata.version(name) for name in ("transformer-lens", "transformers", "torch", "pandas")}
    sys.stdout.write(f"{neighbour}: works ({versions})\n")


if __name__ == "__main__":
    main(sys.argv[1])

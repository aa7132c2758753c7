"""What every token mixer must do, whatever it is: nothing here knows what one computes."""

import inspect

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional
from transformer_lens.hook_points import HookPoint

import emergent_heads as eh
from emergent_heads.errors import ArgumentError
from emergent_heads.models import mixers
from emergent_heads.models.mixers import Mixer, mixer_class

BUILT_IN = sorted(mixers._HOMES)
VOCABULARY, CONTEXT, LENGTH = 11, 40, 36  # longer than the chunks that some of them compute at once


def model_of(mixer: str | tuple[str, ...], seed: int = 0, **settings) -> eh.SmallModel:
    shape = {"n_layers": 2, "d_model": 16, "n_heads": 2, "vocabulary_size": VOCABULARY, "context": CONTEXT}
    return eh.SmallModel(eh.SmallModelConfig(**{**shape, "mixer": mixer, **settings}), seed)


def mixer_in(model: eh.SmallModel, layer: int = 0) -> Mixer:
    return model.block_list[layer].token_mixer


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(5))


@pytest.fixture
def own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixers, "_REGISTERED", {})


def assert_causal(model: eh.SmallModel, tokens: Tensor, *, listening: bool = False) -> None:
    """In double precision, where a leak from the future cannot be taken for rounding."""
    model.double()

    def run(tokens: Tensor) -> Tensor:
        with torch.no_grad():
            return model.run_with_cache(tokens)[0] if listening else model(tokens)

    before = run(tokens)
    for position in (0, 1, 17, 32, LENGTH - 1):
        changed = tokens.clone()
        changed[:, position] = (changed[:, position] + 1) % VOCABULARY
        moved = (run(changed) - before).abs().amax((0, 2))
        assert moved[:position].sum() < 1e-12
        assert moved[position:].min() > 1e-12  # and it is seen at all positions from there on
        assert moved[position] > 1e-3


@pytest.mark.parametrize("listening", [False, True], ids=["nobody listens", "all is cached"])
@pytest.mark.parametrize("mixer", BUILT_IN)
def test_no_output_depends_on_a_later_token(mixer, listening, tokens):
    assert_causal(model_of(mixer), tokens, listening=listening)


@pytest.mark.parametrize("length", [1, 5, 33])
@pytest.mark.parametrize("mixer", BUILT_IN)
def test_a_sequence_shorter_than_the_context_is_a_longer_ones_beginning(mixer, length, tokens):
    model = model_of(mixer).double()
    torch.testing.assert_close(model(tokens[:, :length]), model(tokens)[:, :length], atol=1e-9, rtol=0)


@pytest.mark.parametrize("mixer", BUILT_IN)
def test_the_same_seed_draws_the_same_weights(mixer):
    state = torch.get_rng_state()
    first = model_of(mixer).state_dict()
    torch.testing.assert_close(torch.get_rng_state(), state)  # nothing is drawn from the global generator
    torch.manual_seed(1)
    again, other = model_of(mixer).state_dict(), model_of(mixer, seed=1).state_dict()
    assert all(torch.equal(weight, again[name]) for name, weight in first.items())
    in_mixer = [name for name in first if name.startswith(("blocks.0.attn.", "blocks.0.mixer."))]
    assert any(not torch.equal(first[name], other[name]) for name in in_mixer)


@pytest.mark.parametrize("mixer", BUILT_IN)
def test_weights_alone_make_the_model(mixer, tokens):
    """A checkpoint holds what was learned: loaded into a model of another seed it gives the same outputs."""
    model, other = model_of(mixer), model_of(mixer, seed=1)
    assert not torch.allclose(model(tokens), other(tokens))
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(tokens), other(tokens))


@pytest.mark.parametrize("settings", [{}, {"biases": False}, {"initialisation": "gpt2"}, {"d_head": 6}], ids=str)
@pytest.mark.parametrize("mixer", BUILT_IN)
def test_every_parameter_learns(mixer, settings, tokens):
    model = model_of(mixer, **settings)
    model(tokens, "loss").backward()
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        assert gradient.isfinite().all(), name
        assert gradient.any(), name


@pytest.mark.parametrize("mixer", BUILT_IN)
def test_it_learns_in_half_precision(mixer, tokens):
    """As training on a GPU runs it: logits near those in full precision, and finite gradients."""
    model = model_of(mixer)
    exact = model(tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(tokens)
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    assert functional.cosine_similarity(logits.float().flatten(), exact.flatten(), dim=0) > 0.999
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize("mixer", BUILT_IN)
def test_every_hook_fires_and_editing_it_changes_the_output(mixer, tokens):
    model = model_of(mixer).double()  # so that the smallest effect stands out from rounding
    with torch.no_grad():
        plain = model(tokens)
        cached, cache = model.run_with_cache(tokens)
        torch.testing.assert_close(cached, plain, atol=1e-9, rtol=0)
        for layer in range(2):
            hooks = [point for point in mixer_in(model, layer).modules() if isinstance(point, HookPoint)]
            assert hooks
            for point in hooks:
                name = point.name
                assert name is not None
                assert cache[name].shape[0] == len(tokens), name
                edited = model.run_with_hooks(tokens, fwd_hooks=[(name, scattered)])
                assert edited.isfinite().all(), name
                assert (edited - plain).abs().max() > 1e-9, name
        torch.testing.assert_close(model(tokens), plain)  # no edit stays


def scattered(activation: Tensor, hook: HookPoint) -> Tensor:
    """Each entry times its own factor, which a norm or a softmax does not take back wholly."""
    generator = torch.Generator().manual_seed(0)
    return activation * (0.5 + torch.rand(activation.shape, generator=generator))


@pytest.mark.parametrize("mixer", [name for name in BUILT_IN if mixer_class(name).has_pattern])
def test_a_pattern_is_what_values_are_mixed_by(mixer, tokens):
    """The promise of `has_pattern`: hook_z is hook_pattern times hook_v, and `out` takes it from there."""
    model = model_of(mixer)
    _, cache = model.run_with_cache(tokens)
    prefix = "blocks.1.attn" if mixer == "attention" else "blocks.1.mixer"
    pattern, v, z = (cache[f"{prefix}.hook_{name}"] for name in ("pattern", "v", "z"))
    assert pattern.shape == (2, 2, LENGTH, LENGTH)
    torch.testing.assert_close(torch.einsum("rhds,rshe->rdhe", pattern, v), z, atol=1e-5, rtol=1e-5)
    out = mixer_in(model, 1).get_submodule("out")(z.flatten(2))
    added = cache["blocks.1.hook_attn_out" if mixer == "attention" else "blocks.1.hook_mixer_out"]
    torch.testing.assert_close(out, added, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mixer", BUILT_IN)
def test_the_effective_pattern_is_causal(mixer, tokens):
    patterns = eh.effective_pattern(model_of(mixer), tokens)
    assert list(patterns) == [0, 1]
    for pattern in patterns.values():
        assert pattern.shape[0] == len(tokens)
        assert pattern.shape[2:] == (LENGTH, LENGTH)
        assert pattern.isfinite().all()
        assert not pattern.triu(1).any()
        assert (pattern.abs().amax((0, 1)) > 0).tril().sum() > LENGTH  # more than each position itself


# PyTorch maps its fused attention one model at a time, and says so.
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("mixer", BUILT_IN)
def test_stacked_parameters_give_each_models_outputs_and_gradients(mixer):
    """`torch.func.vmap` over the parameters of several models, as they are trained together elsewhere."""
    modules = [mixer_in(model_of(mixer, seed)) for seed in (0, 1, 2)]
    parameters, buffers = stack_module_state(modules)  # pyright: ignore[reportArgumentType]
    x, weights = random(3, 2, LENGTH, 16), random(3, 2, LENGTH, 16, seed=1)

    def run(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(modules[0], (parameters, buffers), (x,))

    together = vmap(run)(parameters, buffers, x)
    gradients = torch.autograd.grad((together * weights).sum(), list(parameters.values()))
    for index, module in enumerate(modules):
        alone = module(x[index])
        torch.testing.assert_close(together[index], alone, atol=1e-5, rtol=1e-4)
        expected = torch.autograd.grad((alone * weights[index]).sum(), list(module.parameters()))
        for stacked, single in zip(gradients, expected, strict=True):
            torch.testing.assert_close(stacked[index], single, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("mixer", BUILT_IN)
def test_a_misspelt_option_is_refused_with_the_right_name(mixer):
    options = list(inspect.signature(mixer_class(mixer)).parameters)[2:]
    misspelt = options[0][:-1] if options else "hidden_units"
    with pytest.raises(ArgumentError, match=f"no mixer option '{misspelt}' for {mixer}") as caught:
        model_of(mixer, mixer_options={misspelt: 4})
    assert (options[0] if options else "it takes none") in str(caught.value)


def test_an_unknown_mixer_is_refused_with_the_nearest_names():
    with pytest.raises(ArgumentError, match=r"no mixer 'rwkv'.*rwkv4"):
        model_of("rwkv")


@pytest.mark.parametrize("mixer", BUILT_IN)
def test_layers_may_have_mixers_of_their_own(mixer, tokens):
    model = model_of(("attention", mixer))
    assert [type(block.token_mixer) for block in model.block_list] == [mixer_class("attention"), mixer_class(mixer)]
    assert_causal(model, tokens)


def test_each_layers_mixer_gets_the_options_it_takes():
    options = {"hidden_units": 3, "rank": 5}
    model = model_of(("mlp_mixer", "rwkv7"), mixer_options=options)
    assert mixer_in(model, 0).hidden_units == 3
    assert mixer_in(model, 1).get_parameter("a_up.weight").shape == (16, 5)


def test_a_mixture_must_name_a_mixer_for_each_layer():
    with pytest.raises(ArgumentError, match="3 mixers for 2 layers"):
        model_of(("attention", "mamba", "mamba"))


class RunningMean(Mixer):
    """The mean of all positions so far, times a learned factor: as a user would write one."""

    def __init__(self, config: eh.SmallModelConfig, layer: int, power: int = 1) -> None:
        super().__init__(config, layer)
        self.scale = nn.Parameter(torch.zeros(config.d_model))
        self.power = power
        self.hook_mean = HookPoint()

    def initialise(self, generator: torch.Generator) -> None:
        self.scale.copy_(torch.rand(self.scale.shape, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        count = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        return self.hook_mean(x.cumsum(1) / count) * self.scale**self.power


@pytest.mark.usefixtures("own_names")
class TestOnesOwnMixer:
    def test_it_is_used_by_its_name(self, tokens):
        eh.register_mixer("running_mean")(RunningMean)
        model = model_of(("running_mean", "attention"), mixer_options={"power": 2})
        assert mixer_in(model).power == 2
        assert mixer_in(model).get_parameter("scale").all()
        _, cache = model.run_with_cache(tokens)
        mean = cache["blocks.0.mixer.hook_mean"]
        torch.testing.assert_close(mean[:, 3], cache["blocks.0.ln1.hook_normalized"][:, :4].mean(1))
        assert_causal(model, tokens)

    def test_it_has_no_pattern_until_it_says_so(self, tokens):
        eh.register_mixer("running_mean")(RunningMean)
        with pytest.raises(ArgumentError, match="RunningMean mixer implies no token-mixing matrix"):
            eh.effective_pattern(model_of("running_mean"), tokens)

    def test_a_wrong_option_is_refused(self):
        eh.register_mixer("running_mean")(RunningMean)
        with pytest.raises(ArgumentError, match=r"no mixer option 'pover'.*power"):
            model_of("running_mean", mixer_options={"pover": 2})

    def test_its_name_is_among_the_nearest(self):
        eh.register_mixer("running_mean")(RunningMean)
        with pytest.raises(ArgumentError, match="running_mean"):
            model_of("runing_mean")

    @pytest.mark.parametrize("name", ["attention", "rwkv7"])
    def test_a_built_in_name_is_taken(self, name):
        with pytest.raises(ArgumentError, match="choose another name"):
            eh.register_mixer(name)(RunningMean)

    def test_another_class_of_the_same_name_is_refused(self):
        eh.register_mixer("running_mean")(RunningMean)
        eh.register_mixer("running_mean")(RunningMean)  # a cell that is run again
        with pytest.raises(ArgumentError, match="there is a mixer 'running_mean' already"):
            eh.register_mixer("running_mean")(mixer_class("linear"))

    @pytest.mark.parametrize("thing", [nn.Linear, len], ids=["another module", "a function"])
    def test_what_is_no_mixer_is_refused(self, thing):
        with pytest.raises(ArgumentError, match="must be a class derived from"):
            eh.register_mixer("linear_map")(thing)

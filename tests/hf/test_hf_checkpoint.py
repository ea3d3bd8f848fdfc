"""Shaped models saved and loaded, exactly or with an error; and `from_pretrained` of their folders."""

import hashlib
import json
import shutil
import subprocess
import sys

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    Trainer,
    TrainingArguments,
)

from hf_models import config_of, inputs_of, loud, unlike
from limitformer import InputError
from limitformer.hf import Shaping, load_shaped, shape_model
from limitformer.nn import gains
from limitformer.nn.strengths import ENDING

SHAPINGS = {
    "attention alone": Shaping(),
    "one gain a layer": Shaping(per_head=False, trained=False, tau0=0.7, float32=True, gamma2=None),
    "residuals": Shaping(residual_gamma=0.3),
    "everything": Shaping(residual_gamma=0.3, shaped_relu=True, gamma1=0.9),
}


def built(family, name, shaping, seed=0):
    """A model with a head, in float32, whose gains differ from their start values."""
    torch.manual_seed(seed)
    options = {"is_decoder": True} if name == "BertLMHeadModel" else {}
    model = loud(getattr(transformers, name)(config_of(family, **options)).eval())
    return unlike(shape_model(model, shaping))


def saved(folder, family="bert", name="BertForMaskedLM", shaping=None, **options):
    model = built(family, name, shaping or Shaping(residual_gamma=0.3))
    model.save_pretrained(folder, **options)
    return model


@torch.no_grad()
def outputs(model, family):
    """Return the logits, or the tokens of a model without a head."""
    inputs = inputs_of("vit" if family == "vit" else "text", batch=1)
    inputs = {name: x.float() if x.is_floating_point() else x for name, x in inputs.items()}
    out = model(**inputs)
    return out.logits if "logits" in out else out.last_hidden_state


@pytest.mark.parametrize(
    ("family", "name", "shaping"),
    [
        ("bert", "BertForSequenceClassification", "everything"),
        ("bert", "BertLMHeadModel", "attention alone"),
        ("roberta", "RobertaForMaskedLM", "everything"),
        ("gpt2", "GPT2LMHeadModel", "one gain a layer"),
        ("llama", "LlamaForCausalLM", "residuals"),
        ("vit", "ViTModel", "everything"),
    ],
)
def test_loaded_model_has_the_saved_logits(family, name, shaping, tmp_path):
    """Outputs are equal to the last bit after two saves, and the class is the library's."""
    model = built(family, name, SHAPINGS[shaping])
    wanted = outputs(model, family)
    model.save_pretrained(tmp_path / "once")
    first = load_shaped(tmp_path / "once").eval()
    assert type(first) is getattr(transformers, name)
    assert torch.equal(outputs(first, family), wanted)
    first.save_pretrained(str(tmp_path / "twice"))
    second = load_shaped(str(tmp_path / "twice"))
    assert torch.equal(outputs(second, family), wanted)
    nowhere = {"_name_or_path": ""}
    assert second.config.to_dict() | nowhere == first.config.to_dict() | nowhere
    assert all(torch.equal(value, first.state_dict()[name]) for name, value in model.state_dict().items())
    for one, other in zip(gains(model), gains(second), strict=True):
        assert (one.start, one.value.requires_grad) == (other.start, other.value.requires_grad)
    assert model.config.shaping == second.config.shaping
    with pytest.raises(InputError, match="shaped already"):
        shape_model(second)
    with pytest.raises(KeyError, match=r"limitformer\.hf\.load_shaped"):
        type(second).from_pretrained(tmp_path / "twice")


def test_load_shaped_reads_shards_and_casts_to_16_bits(tmp_path):
    model = saved(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert torch.equal(outputs(load_shaped(tmp_path), "bert"), outputs(model, "bert"))
    assert torch.equal(outputs(load_shaped(tmp_path, device_map="cpu"), "bert"), outputs(model, "bert"))
    for dtype in (torch.bfloat16, torch.float16):
        half = load_shaped(tmp_path, dtype=dtype)
        assert half.dtype == dtype
        assert len(gains(half)) == len(gains(model))
        for name, value in model.state_dict().items():
            rounded = value.is_floating_point() and not name.endswith(ENDING)
            assert torch.equal(half.state_dict()[name], value.to(dtype) if rounded else value), name


PLAIN = {
    "AutoModel": AutoModel.from_pretrained,
    "its class": transformers.BertForMaskedLM.from_pretrained,
    "another head": AutoModelForSequenceClassification.from_pretrained,
    "another family": transformers.RobertaModel.from_pretrained,
    "its configuration": lambda folder: AutoModel.from_config(AutoConfig.from_pretrained(folder)),
}


@pytest.mark.parametrize("how", PLAIN)
def test_from_pretrained_fails_and_names_load_shaped(how, tmp_path):
    saved(tmp_path)
    with pytest.raises(KeyError, match=r"of a shaped model, which limitformer\.hf\.load_shaped loads"):
        PLAIN[how](tmp_path)


@pytest.mark.slow
def test_from_pretrained_fails_without_limitformer(tmp_path):
    saved(tmp_path)
    program = (
        "import sys\n"
        "from transformers import AutoModelForMaskedLM\n"
        f"try: AutoModelForMaskedLM.from_pretrained({str(tmp_path)!r}, attn_implementation='sdpa')\n"
        "except KeyError as error: print(error)\n"
        "assert 'limitformer' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert "of a shaped model, which limitformer.hf.load_shaped loads" in done.stdout


def edited(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def weights(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file(change(tensors), path, {"format": "pt"})


BROKEN = {
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "The weights in .* cannot be read: "),
    "no gains": (
        lambda folder: weights(folder, lambda kept: {name: x for name, x in kept.items() if "gamma1" not in name}),
        r"does not hold the whole model: 2 missing weights, bert.encoder.layer.0.attention.self.shaping.gamma1.value",
    ),
    "more weights": (
        lambda folder: weights(folder, lambda kept: kept | {"extra.weight": torch.zeros(1)}),
        r"does not hold the whole model: 1 unexpected weights, extra.weight",
    ),
    "gains of other heads": (
        lambda folder: weights(
            folder, lambda kept: {name: x[:2].clone() if "gamma1" in name else x for name, x in kept.items()}
        ),
        r"(cannot be read|does not hold the whole model): ",
    ),
    "half a configuration": (
        lambda folder: (folder / "config.json").write_text((folder / "config.json").read_text()[:99]),
        "config.json cannot be read: ",
    ),
    "no model type": (lambda folder: edited(folder, model_type="none"), "config.json cannot be read: "),
    "no shaping": (lambda folder: edited(folder, shaping=None), "holds no shaped model. Load it with from_pretrained"),
    "a shaping that cannot be": (
        lambda folder: edited(folder, shaping={"tau0": -1.0}),
        "no shaping that can be used: tau0 must be positive",
    ),
    "no class": (lambda folder: edited(folder, architectures=None), "names no model of transformers"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_load_shaped_refuses_broken_folders_in_one_line(name, tmp_path):
    saved(tmp_path)
    spoil, message = BROKEN[name]
    spoil(tmp_path)
    with pytest.raises(InputError, match=message) as caught:
        load_shaped(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value) or name == "no class"


def test_load_shaped_reads_a_subfolder(tmp_path):
    model = saved(tmp_path / "models" / "b")
    assert torch.equal(outputs(load_shaped(tmp_path / "models", subfolder="b"), "bert"), outputs(model, "bert"))
    with pytest.raises(InputError, match=r"There is no config.json in .*models/c"):
        load_shaped(tmp_path / "models", subfolder="c")


def test_load_shaped_refuses_a_configuration(tmp_path):
    """A configuration may hold another shaping, or none."""
    saved(tmp_path)
    with pytest.raises(InputError, match=r"^load_shaped reads the configuration itself\. Nearest: its entries"):
        load_shaped(tmp_path, config=config_of("bert"))


def test_load_shaped_refuses_another_attention(tmp_path):
    saved(tmp_path)
    with pytest.raises(InputError, match=r"^A shaped model has the attention 'shaped'; got attn_implementation='sdpa'"):
        load_shaped(tmp_path, attn_implementation="sdpa")
    assert load_shaped(tmp_path, attn_implementation="shaped").config._attn_implementation == "shaped"


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        ids = inputs_of("text", seed=index, batch=1)["input_ids"][0]
        return {"input_ids": ids, "labels": ids}


def test_trainer_resumes_a_shaped_model(tmp_path):
    """3 + 3 steps equal 6 to the last bit, and `load_shaped` loads a checkpoint of the Trainer."""

    def trained(folder, **resume):
        arguments = TrainingArguments(
            str(folder), max_steps=6, per_device_train_batch_size=4, learning_rate=1e-2, report_to=[], use_cpu=True,
            save_steps=3, disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        model = built("bert", "BertForMaskedLM", SHAPINGS["everything"])
        Trainer(model, arguments, train_dataset=Texts()).train(**resume)
        return model.eval()

    whole = trained(tmp_path / "whole")
    resumed = trained(tmp_path / "again", resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    start = built("bert", "BertForMaskedLM", SHAPINGS["everything"]).state_dict()
    moved = [name for name, value in whole.state_dict().items() if not torch.equal(value, start[name])]
    assert len([name for name in moved if "shaping" in name or "residual" in name or "negative" in name]) == 14
    again = load_shaped(tmp_path / "whole" / "checkpoint-6").eval()
    assert torch.equal(outputs(again, "bert"), outputs(whole, "bert"))


# Heads, options and locations, as for `from_pretrained`.


def test_load_shaped_takes_another_number_of_labels(tmp_path):
    """A head of another size is new; all other weights are loaded."""
    model = saved(tmp_path, name="BertForSequenceClassification")
    same = load_shaped(tmp_path, num_labels=2)
    assert torch.equal(outputs(same, "bert"), outputs(model, "bert"))
    message = r"The weights in .* cannot be read: .* Nearest: ignore_mismatched_sizes=True, if a head has another size"
    with pytest.raises(InputError, match=message) as caught:
        load_shaped(tmp_path, num_labels=5)
    assert "\n" not in str(caught.value)
    other = load_shaped(tmp_path, num_labels=5, ignore_mismatched_sizes=True)
    assert other.config.num_labels == 5
    assert other.classifier.weight.shape == (5, 16)
    assert outputs(other, "bert").shape == (1, 5)
    for name, value in model.bert.state_dict().items():
        assert torch.equal(other.bert.state_dict()[name], value), name


@pytest.mark.parametrize(
    ("family", "one", "other"),
    [
        ("bert", "BertForSequenceClassification", "BertModel"),
        ("gpt2", "GPT2LMHeadModel", "GPT2ForSequenceClassification"),
        ("llama", "LlamaForCausalLM", "LlamaModel"),
    ],
)
def test_load_shaped_with_another_class_draws_its_head(family, one, other, tmp_path):
    """All weights below the head are loaded, including gains and residuals, and the model can be saved again."""
    model = saved(tmp_path / "one", family, one)
    again = load_shaped(tmp_path / "one", getattr(transformers, other)).eval()
    assert type(again) is getattr(transformers, other)
    base = {name: x for name, x in model.base_model.state_dict().items() if not name.startswith("pooler.")}
    for name, value in base.items():
        assert torch.equal(again.base_model.state_dict()[name], value), name
    again.save_pretrained(tmp_path / "other")
    assert torch.equal(outputs(load_shaped(tmp_path / "other"), family), outputs(again, family))


def test_load_shaped_with_another_class_needs_the_whole_body(tmp_path):
    saved(tmp_path)
    weights(tmp_path, lambda tensors: {name: x for name, x in tensors.items() if "gamma1" not in name})
    with pytest.raises(InputError, match=r"does not hold the whole model: 2 missing weights, .*gamma1"):
        load_shaped(tmp_path, transformers.BertForSequenceClassification)
    saved(tmp_path / "b")
    weights(tmp_path / "b", lambda tensors: {k: x[:2].clone() if "gamma1" in k else x for k, x in tensors.items()})
    with pytest.raises(InputError, match=r"does not hold the whole model: 2 mismatched weights, .*gamma1"):
        load_shaped(tmp_path / "b", ignore_mismatched_sizes=True)


@pytest.mark.parametrize(
    ("model_class", "name"),
    [
        (transformers.RobertaModel, "RobertaModel"),
        (AutoModelForSequenceClassification, "AutoModelForSequenceClassification"),
        ("BertModel", "'BertModel'"),
    ],
)
def test_load_shaped_refuses_other_classes(model_class, name, tmp_path):
    saved(tmp_path)
    message = rf"model_class must be a class of models of 'bert', such as the saved one; got {name}\."
    with pytest.raises(InputError, match=message):
        load_shaped(tmp_path, model_class)


class Twice(transformers.BertForSequenceClassification):
    """A user's class with logits twice as large and another layer."""

    def __init__(self, config):
        super().__init__(config)
        self.extra = torch.nn.Linear(2, 2)
        self.post_init()

    def forward(self, *args, **options):
        out = super().forward(*args, **options)
        out.logits = self.extra(2 * out.logits)
        return out


def test_load_shaped_returns_the_class_of_the_user(tmp_path, monkeypatch):
    torch.manual_seed(0)
    model = unlike(shape_model(loud(Twice(config_of("bert")).eval())))
    wanted = outputs(model, "bert")
    model.save_pretrained(tmp_path / "once")
    first = load_shaped(tmp_path / "once").eval()
    assert type(first) is Twice
    assert torch.equal(outputs(first, "bert"), wanted)
    first.save_pretrained(tmp_path / "twice")
    assert type(load_shaped(tmp_path / "twice")) is Twice
    model.bert.save_pretrained(tmp_path / "body")  # a part of the model, with or without a pooler
    body, report = load_shaped(tmp_path / "body", output_loading_info=True)
    assert type(body) is transformers.BertModel
    assert set(body.state_dict()) == set(model.bert.state_dict())
    assert not report["missing_keys"]
    assert torch.equal(outputs(body, "bert"), outputs(model.bert, "bert"))
    monkeypatch.delitem(sys.modules, __name__)
    message = rf"The model is a {Twice.__name__} of {__name__}, which is not imported here\. Nearest: import it"
    with pytest.raises(InputError, match=message):
        load_shaped(tmp_path / "once")
    assert type(load_shaped(tmp_path / "once", Twice)) is Twice


def test_load_shaped_does_not_import_a_module_named_in_a_file(tmp_path):
    saved(tmp_path)
    edited(tmp_path, architectures=["Flight"], shaped_class="antigravity:Flight")
    with pytest.raises(InputError, match="The model is a Flight of antigravity, which is not imported here"):
        load_shaped(tmp_path)
    assert "antigravity" not in sys.modules


def as_hub(folder, cache, name="someone/shaped", commit="0123456789abcdef0123456789abcdef01234567"):
    """Lay a saved model out as the hub's cache: blobs by digest, and a snapshot of links to them."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    for path in (snapshot, repository / "blobs", repository / "refs"):
        path.mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    for path in folder.iterdir():
        blob = repository / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copy(path, blob)
        (snapshot / path.name).symlink_to(blob)
    return name


def test_load_shaped_takes_the_name_of_a_model_on_the_hub(tmp_path):
    """The test needs only a cache in the layout of the hub."""
    model = saved(tmp_path / "m", max_shard_size="8KB")
    name = as_hub(tmp_path / "m", tmp_path / "cache")
    places = {"cache_dir": tmp_path / "cache", "local_files_only": True}
    assert torch.equal(outputs(load_shaped(name, **places), "bert"), outputs(model, "bert"))
    half = load_shaped(name, dtype=torch.bfloat16, revision="main", **places)
    assert half.dtype == torch.bfloat16
    for wrong in ({"revision": "other"}, {"cache_dir": tmp_path / "empty"}):
        with pytest.raises(InputError, match=r"^someone/shaped/config\.json cannot be read: .*$"):
            load_shaped(name, **places | wrong)

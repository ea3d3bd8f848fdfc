"""Messages and bars of transformers do not appear where limitformer builds or loads a model."""

import json
import logging as python_logging

import pytest
import transformers
from transformers.utils import logging

import limitformer as lf
from limitformer.subjects.configurations import config_from, quiet_transformers

SMALL = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 30, "n_positions": 16}
CODE = """
from transformers import GPT2Config, GPT2LMHeadModel

class Config(GPT2Config):
    model_type = "own"

class Model(GPT2LMHeadModel):
    config_class = Config
"""


@pytest.fixture
def spoken(monkeypatch):
    """Return the warnings of transformers, which a new process would print."""
    lines = []
    handler = python_logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.get_logger("transformers")
    before = logging.get_verbosity()
    logging.set_verbosity_warning()
    logging.enable_progress_bar()
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)
    logging.set_verbosity(before)


@pytest.fixture
def own_code(tmp_path, spoken):
    """Write a folder of a model with code and weights of its own."""
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**SMALL, **ids)).save_pretrained(tmp_path)
    (tmp_path / "code.py").write_text(CODE, encoding="utf-8")
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return tmp_path


def test_weights_of_own_code_are_loaded_without_a_bar(own_code, capfd, spoken):
    capfd.readouterr()
    lf.check(own_code, 4, seed=0, trust_remote_code=True, progress=False)
    assert "Loading weights" not in capfd.readouterr().err
    assert spoken == []
    assert logging.is_progress_bar_enabled()


def test_configuration_is_made_without_a_warning(spoken):
    logging.warning_once.cache_clear()
    config_from({"model_type": "gpt2", **SMALL})
    assert spoken == []
    logging.warning_once.cache_clear()
    transformers.GPT2Config(**SMALL)  # of the user
    assert any("bos_token_id" in line for line in spoken)


def test_level_and_bars_of_the_user_come_back(spoken):
    logging.disable_progress_bar()
    with pytest.raises(ZeroDivisionError), quiet_transformers():
        1 / 0  # noqa: B018
    assert not logging.is_progress_bar_enabled()
    assert logging.get_verbosity() == logging.WARNING
    logging.enable_progress_bar()

"""Lightning's command line on the programs and configs in `examples/lightning`."""

from __future__ import annotations

import contextlib
import inspect
import io
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lowbit_optim
from tests.integrations.helpers import EXAMPLES, assert_close, assert_same, floats, load, shell, stored_as

FOLDER = EXAMPLES / "lightning"
# As in the configs: two epochs of three steps, a checkpoint after each.
STEPS = 6
# As in docs/integrations/lightning.md.
OFFLOAD = """
model:
  optimizer:
    class_path: lowbit_optim.CPUOffloadOptimizer
    init_args:
      optimizer_class: lowbit_optim.AdamW
    dict_kwargs:
      lr: 1.0e-3
      preset: balanced
"""


def fit(folder: Path, program: str, config: str, out: str, *options: object) -> list[float]:
    """Run an example with its checkpoints in the folder `out`, and return its losses."""
    command = (sys.executable, FOLDER / program, "fit", "--config", FOLDER / config)
    text = shell(*command, f"--trainer.callbacks.dirpath={out}", *options, folder=folder)
    return floats(r"step \d+ loss (\S+)", text)


def resume(folder: Path, program: str, config: str, *options: object) -> list[float]:
    """Run an example, and its second epoch once more from the checkpoint of the first, with the same losses.

    Returns:
        The losses of the whole run; checkpoints are left in `whole` and `resumed`.
    """
    whole = fit(folder, program, config, "whole", *options)
    assert len(whole) == STEPS, whole
    resumed = fit(folder, program, config, "resumed", *options, "--ckpt_path", folder / "whole/epoch=0.ckpt")
    assert resumed == whole[STEPS // 2 :], (resumed, whole)
    return whole


def assert_learning(losses: list[float]) -> str:
    """Check that each batch's loss is smaller in the second epoch, and return a note."""
    assert len(losses) == STEPS, losses
    half = STEPS // 2
    assert all(after < before for before, after in zip(losses[:half], losses[half:], strict=True)), losses
    return f"losses {losses[0]:.4f} to {losses[half]:.4f}"


def assert_same_checkpoints(mine: Any, theirs: Any) -> None:
    """Compare two of Lightning's checkpoints: weights, optimizers, schedules and counts of steps, bit for bit."""
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step"):
        assert_same(mine[key], theirs[key], key)


# One device ----------------------------------------------------------------------------------------------------------


def cli_adamw8bit(folder: Path) -> str:
    note = assert_learning(fit(folder, "main.py", "adamw8bit.yaml", "out"))
    saved = load(folder / "out/epoch=1.ckpt")
    assert {str(weight.dtype) for weight in saved["state_dict"].values()} == {"torch.bfloat16"}
    # Biases are too small for blocks.
    assert stored_as(saved["optimizer_states"][0]) == {"int8/b32/signed", "int8/b32/unsigned", "torch.float32"}
    return note


def cli_preset(folder: Path) -> str:
    note = assert_learning(fit(folder, "main.py", "preset.yaml", "out"))
    state = load(folder / "out/epoch=1.ckpt")["optimizer_states"][0]
    # The optimizer was made before `bf16-true` cast the weights, and keeps correction bits all the same.
    for entry in state["state"].values():
        assert "correction" in entry, entry.keys()
    return note


def cli_cpu_offload(folder: Path) -> str:
    (folder / "offload.yaml").write_text(OFFLOAD)
    run = "--trainer.strategy=auto", "--trainer.devices=1"
    losses = fit(folder, "fsdp2.py", "fsdp2.yaml", "offloaded", *run, "--config", "offload.yaml")
    assert losses == fit(folder, "fsdp2.py", "fsdp2.yaml", "resident", *run), losses
    # The optimizers' options differ by `min_offload_numel` and the like alone.
    mine, wanted = (load(folder / out / "epoch=1.ckpt") for out in ("offloaded", "resident"))
    assert_same(mine["state_dict"], wanted["state_dict"])
    assert_same(mine["optimizer_states"][0]["state"], wanted["optimizer_states"][0]["state"])
    return "losses, weights and state as without, bit for bit"


def resume_is_exact(folder: Path) -> str:
    for config in ("adamw8bit.yaml", "preset.yaml"):
        resume(folder, "main.py", config)
        assert_same_checkpoints(load(folder / "resumed/epoch=1.ckpt"), load(folder / "whole/epoch=1.ckpt"))
        shutil.rmtree(folder / "whole")
        shutil.rmtree(folder / "resumed")
    return "losses, weights and state bit for bit"


def fp32_equals_torch(folder: Path) -> str:
    run = "--trainer.precision=32-true", "--trainer.max_epochs=4"
    mine = fit(
        folder, "main.py", "adamw8bit.yaml", "mine", *run, "--optimizer=lowbit_optim.AdamW", "--optimizer.state=fp32"
    )
    wanted = fit(folder, "main.py", "adamw8bit.yaml", "torch", *run, "--optimizer=torch.optim.AdamW")
    assert len(mine) == 12, mine
    return f"12 losses within {assert_close(mine, wanted, 1e-6):.0e} of torch.optim.AdamW's"


# Arguments -----------------------------------------------------------------------------------------------------------


def options_of(cls: type) -> Iterable[str]:
    """Return the names of a class's arguments, those of `LowBitOptions` among them."""
    names = [
        name for name, parameter in inspect.signature(cls).parameters.items() if parameter.kind.name != "VAR_KEYWORD"
    ]
    return [*names[1:], *lowbit_optim.LowBitOptions.__annotations__]


def signatures(folder: Path) -> str:
    """`--optimizer.help=lowbit_optim.X` names, types and explains every argument; wrong ones are refused."""
    from lightning.pytorch.cli import LightningArgumentParser

    parser = LightningArgumentParser()
    parser.add_optimizer_args()

    def parse(*arguments: str) -> tuple[Any, str]:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            try:
                return parser.parse_args(arguments).optimizer, ""
            except SystemExit:
                return None, printed.getvalue()

    public = [getattr(lowbit_optim, name) for name in lowbit_optim.__all__]
    base = lowbit_optim.LowBitOptimizer
    classes = [thing for thing in public if inspect.isclass(thing) and issubclass(thing, base) and thing is not base]
    for cls in classes:
        name = f"lowbit_optim.{cls.__name__}"
        _, text = parse(f"--optimizer.help={name}")
        for option in options_of(cls):
            entry = text.split(f"\n  --optimizer.{option} ")
            assert len(entry) == 2, f"{name}: no entry for {option}\n{text}"
            words = " ".join(entry[1].split("\n  --")[0].split())
            explanation, found, kind = words.partition("(type: ")
            assert found, f"{name}: {option} has no type: {words}"
            assert kind.split(",")[0].split(")")[0] not in ("Any", "null"), f"{name}: {option} has no type: {words}"
            assert len(explanation.split()) > 2, f"{name}: {option} is not explained: {words}"
        given, text = parse(f"--optimizer={name}", "--optimizer.preset=balanced", "--optimizer.lr=0.5")
        assert given.init_args.preset == "balanced", text
        assert given.init_args.lr == 0.5, text
        for wrong in ("--optimizer.seed=often", "--optimizer.presett=balanced"):
            given, text = parse(f"--optimizer={name}", wrong)
            assert given is None, f"{name}: accepted {wrong}"
    return f"{len(classes)} classes"


# Two processes -------------------------------------------------------------------------------------------------------


def gathered(folder: Path, checkpoint: str) -> Any:
    """Return a distributed checkpoint's tensors, each whole."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(folder / checkpoint, folder / "gathered.pt")
    return load(folder / "gathered.pt")


def assert_trained(before: Any, after: Any) -> None:
    """Check that every weight tensor has changed: with parameters made too early, losses look fine and none does."""
    assert before.keys() == after.keys()
    assert all((before[name] != after[name]).any() for name in before)


def fsdp2_distributed_checkpoint(folder: Path) -> str:
    resume(folder, "fsdp2.py", "fsdp2.yaml")
    mine, wanted = gathered(folder, "resumed/epoch=1.ckpt"), gathered(folder, "whole/epoch=1.ckpt")
    assert_trained(gathered(folder, "whole/epoch=0.ckpt")["state_dict"], wanted["state_dict"])
    assert any(name.endswith("correction") for name in str_keys(wanted)), str_keys(wanted)
    assert_same(mine, wanted)
    return "losses, weights and state bit for bit"


def fsdp2_full_checkpoint(folder: Path) -> str:
    resume(folder, "fsdp2.py", "fsdp2.yaml", "--trainer.strategy.save_distributed_checkpoint=false")
    wanted = load(folder / "whole/epoch=1.ckpt")
    assert_trained(load(folder / "whole/epoch=0.ckpt")["state_dict"], wanted["state_dict"])
    assert {"int8/b32/signed", "int8/b32/unsigned"} <= stored_as(wanted["optimizer_states"][0])
    assert_same_checkpoints(load(folder / "resumed/epoch=1.ckpt"), wanted)
    return "losses, weights and state bit for bit"


def fsdp2_fp32_equals_torch(folder: Path) -> str:
    # `lr` and `preset` of the config stay where the class stays, so the preset has to be taken back.
    run = "--trainer.precision=32-true", "--trainer.max_epochs=4"
    mine = "--model.optimizer.preset=null", "--model.optimizer.state=fp32"
    losses = fit(folder, "fsdp2.py", "fsdp2.yaml", "mine", *run, *mine)
    wanted = fit(folder, "fsdp2.py", "fsdp2.yaml", "torch", *run, "--model.optimizer=torch.optim.AdamW")
    assert len(losses) == 12, losses
    return f"12 losses within {assert_close(losses, wanted, 1e-6):.0e} of torch.optim.AdamW's"


def str_keys(nested: Any, prefix: str = "") -> list[str]:
    """Return the dotted names of everything in nested mappings."""
    if not isinstance(nested, dict):
        return [prefix]
    return [name for key, value in nested.items() for name in str_keys(value, f"{prefix}.{key}")]


CASES: dict[str, Callable[[Path], str | None]] = {
    "cli_adamw8bit": cli_adamw8bit,
    "cli_preset": cli_preset,
    "cli_cpu_offload": cli_cpu_offload,
    "signatures": signatures,
    "resume": resume_is_exact,
    "fp32_equals_torch": fp32_equals_torch,
    "fsdp2_distributed_checkpoint": fsdp2_distributed_checkpoint,
    "fsdp2_full_checkpoint": fsdp2_full_checkpoint,
    "fsdp2_fp32_equals_torch": fsdp2_fp32_equals_torch,
}

"""torchtune's own recipes, run by its command line on the configs in `examples/torchtune`."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.integrations.helpers import (
    EXAMPLES,
    assert_close,
    assert_falling,
    assert_same,
    floats,
    load,
    shell,
    stored_as,
)

FOLDER = EXAMPLES / "torchtune"
SINGLE = ("run", "full_finetune_single_device")
# The recipe is a copy with the changes of `cpu_recipe`; the option of torchrun comes before it.
DISTRIBUTED = ("run", "--nproc_per_node", "2", "distributed.py")


def tune(folder: Path, recipe: tuple[str, ...], config: str, out: str, *overrides: str) -> tuple[list[float], str]:
    """Run a recipe; return its losses and all that it printed."""
    command = ("tune", *recipe, "--config", FOLDER / config, f"output_dir=./{out}", *overrides)
    text = shell(*command, folder=folder)
    # Every loss is printed by the progress bar too.
    return floats(r"Step \d+ \| loss:([\d.]+)", text), text


def make_assets(folder: Path) -> None:
    """Make the tokenizer, data and model that the configs name."""
    shell(sys.executable, FOLDER / "make_assets.py", folder=folder)


def weights(folder: Path, out: str, epoch: int) -> Any:
    """Return the weights that a run saved after an epoch."""
    return load(folder / out / f"epoch_{epoch}" / "model-00001-of-00001.bin")


def recipe_state(folder: Path, out: str) -> Any:
    """Return what a run saved beside the weights after its last epoch but one."""
    return load(folder / out / "recipe_state/recipe_state.pt")


def resume(
    folder: Path, recipe: tuple[str, ...], config: str, *overrides: str
) -> tuple[list[float], list[float], list[float]]:
    """Run two epochs, and the second once more from what was saved after the first.

    Returns:
        The losses of the whole run, those of its second epoch, and those of the resumed run, whose final weights are
        the same bit for bit.
    """
    whole, _ = tune(folder, recipe, config, "whole", *overrides)
    assert len(whole) == 6, whole
    shutil.copytree(folder / "whole", folder / "resumed", ignore=shutil.ignore_patterns("epoch_1"))
    # On resume the recipe looks for weights in its output folder, and finds its state there by itself.
    again = "resume_from_checkpoint=True", "checkpointer.checkpoint_files=[epoch_0/model-00001-of-00001.bin]"
    resumed, _ = tune(folder, recipe, config, "resumed", *again, *overrides)
    assert_same(weights(folder, "resumed", 1), weights(folder, "whole", 1))
    return whole, whole[3:], resumed


# Cases ---------------------------------------------------------------------------------------------------------------


def adamw_bf16_sr(folder: Path) -> str:
    make_assets(folder)
    losses, _ = tune(folder, SINGLE, "adamw_bf16_sr.yaml", "out")
    assert_falling(losses, 4)
    start, end = load(folder / "toy/model.pt"), weights(folder, "out", 0)
    assert {str(tensor.dtype) for tensor in end.values()} == {"torch.bfloat16"}
    assert all((start[name] != end[name]).any() for name in start)
    return f"losses {losses[0]:.4f} to {losses[-1]:.4f}"


def preset_with_cosine_schedule(folder: Path) -> str:
    make_assets(folder)
    losses, text = tune(folder, SINGLE, "from_preset.yaml", "out")
    # The first step is taken at lr 0, where warm-up starts, and leaves the weights as they are.
    assert len(losses) == 6, losses
    assert losses[-1] < losses[0], losses
    rates = floats(r"Step \d+ \| loss:[\d.]+ lr:([\d.e+-]+)", text)
    wanted = [1e-3 * (step / 2 if step < 2 else 0.5 + 0.5 * math.cos(math.pi * (step - 2) / 4)) for step in range(1, 7)]
    assert max(abs(a - b) for a, b in zip(rates, wanted, strict=True)) < 1e-9, (rates, wanted)
    saved = stored_as(recipe_state(folder, "out")["optimizer"])
    # 8-bit moments, and correction bits beside them.
    assert {"int8/b32/signed", "int8/b32/unsigned", "torch.int8"} <= saved, saved
    return f"losses {losses[0]:.4f} to {losses[-1]:.4f}"


def resume_is_exact(folder: Path) -> str:
    make_assets(folder)
    _, wanted, resumed = resume(folder, SINGLE, "from_preset.yaml")
    assert resumed == wanted, (resumed, wanted)
    return "losses and weights bit for bit"


def optimizer_in_bwd(folder: Path) -> str:
    make_assets(folder)
    losses, _ = tune(folder, SINGLE, "adamw_bf16_sr.yaml", "bf16", "optimizer_in_bwd=True")
    assert_falling(losses, 4)
    run = "dtype=fp32", "optimizer_in_bwd=True"
    mine = "optimizer._component_=lowbit_optim.AdamW", "optimizer.state=fp32"
    losses, _ = tune(folder, SINGLE, "adamw_bf16_sr.yaml", "mine", *run, *mine)
    wanted, _ = tune(folder, SINGLE, "adamw_bf16_sr.yaml", "torch", *run, "optimizer._component_=torch.optim.AdamW")
    return f"fp32: 4 losses within {assert_close(losses, wanted, 1e-6):.0e} of torch.optim.AdamW's"


def optimizer_in_bwd_resume(folder: Path) -> str:
    make_assets(folder)
    _, wanted, resumed = resume(folder, SINGLE, "from_preset.yaml", "optimizer_in_bwd=True")
    assert resumed == wanted, (resumed, wanted)
    return "losses and weights bit for bit"


def fp32_equals_torch(folder: Path) -> str:
    make_assets(folder)
    run = "dtype=fp32", "max_steps_per_epoch=12"
    mine = "optimizer._component_=lowbit_optim.AdamW", "optimizer.state=fp32"
    losses, _ = tune(folder, SINGLE, "adamw_bf16_sr.yaml", "mine", *run, *mine)
    wanted, _ = tune(folder, SINGLE, "adamw_bf16_sr.yaml", "torch", *run, "optimizer._component_=torch.optim.AdamW")
    assert len(losses) == 12, losses
    return f"12 losses within {assert_close(losses, wanted, 1e-6):.0e} of torch.optim.AdamW's"


def cpu_recipe(folder: Path) -> None:
    """Copy torchtune's distributed recipe and make it run without a GPU, where it asks for figures of GPU memory."""
    shell("tune", "cp", "full_finetune_distributed", "distributed.py", folder=folder)
    path = folder / "distributed.py"
    text = path.read_text()
    log = 'log = utils.get_logger("DEBUG")\n'
    for old, new in (
        ("memory_stats = training.get_memory_stats(device=self._device)\n", "memory_stats = None\n"),
        ("training.log_memory_stats(memory_stats)\n", "pass\n"),
        (log, log + "torch.cpu.empty_cache = torch.cpu.reset_peak_memory_stats = lambda: None\n"),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path.write_text(text)


def distributed_resume(folder: Path) -> str:
    make_assets(folder)
    cpu_recipe(folder)
    whole, wanted, resumed = resume(folder, DISTRIBUTED, "from_preset.yaml")
    assert whole[-1] < whole[0], whole
    assert resumed == wanted, (resumed, wanted)
    saved = stored_as(recipe_state(folder, "whole")["optimizer"])
    assert {"int8/b32/signed", "int8/b32/unsigned"} <= saved, saved
    return "2 processes, state saved in full: losses and weights bit for bit"


CASES: dict[str, Callable[[Path], str | None]] = {
    "adamw_bf16_sr": adamw_bf16_sr,
    "preset_with_cosine_schedule": preset_with_cosine_schedule,
    "resume": resume_is_exact,
    "optimizer_in_bwd": optimizer_in_bwd,
    "optimizer_in_bwd_resume": optimizer_in_bwd_resume,
    "fp32_equals_torch": fp32_equals_torch,
    "distributed_resume": distributed_resume,
}

"""The Trainer, accelerate, PEFT and TRL on the programs in `examples/huggingface`."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import lowbit_optim
from tests.integrations.helpers import EXAMPLES, assert_close, assert_same, floats, load, shell, stored_as

FOLDER = EXAMPLES / "huggingface"
STEPS, SAVED = 6, 3
BF16 = torch.bfloat16


def example(name: str) -> ModuleType:
    """Import an example, which imports its neighbours as a script does."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    return importlib.import_module(name)


def optimizer_of(trainer: Any) -> Any:
    """Return the optimizer itself, without what accelerate puts around it."""
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)


def contents(trainer: Any) -> dict[str, Any]:
    """Return all that has to be the same after a resume."""
    return {"model": dict(trainer.model.state_dict()), "optimizer": optimizer_of(trainer).state_dict()}


def losses(trainer: Any) -> list[float]:
    return [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


def assert_learning(found: list[float], count: int = STEPS) -> str:
    assert len(found) == count, found
    assert found[-1] < found[0] - 0.05, found
    return f"losses {found[0]:.4f} to {found[-1]:.4f}"


def resumes(main: Callable[[list[str]], Any], folder: Path, *options: str) -> Any:
    """Run an example, and again from its checkpoint, and compare weights and state bit for bit.

    Returns:
        The trainer that ran undisturbed.
    """
    arguments = ["--output", str(folder), "--steps", str(STEPS), "--save-every", str(SAVED), *options]
    whole = main(arguments)
    expected = contents(whole)
    shutil.rmtree(folder / f"checkpoint-{STEPS}")
    resumed = main([*arguments, "--resume"])
    assert_same(contents(resumed), expected)
    assert losses(resumed) == losses(whole)
    assert float(resumed.state.global_step) == STEPS
    return whole


def train(folder: Path, cls: type, options: Mapping[str, Any], dtype: torch.dtype = BF16, **settings: Any) -> Any:
    """Train the example's model with any optimizer, without checkpoints."""
    settings = {"max_steps": STEPS, "save_strategy": "no", "warmup_steps": 2, "weight_decay": 0.01, **settings}
    trainer = example("trainer").make_trainer(folder, (cls, dict(options)), dtype, **settings)
    # The log has losses rounded to four places.
    original, trainer.exact_losses = trainer.compute_loss, []

    def compute_loss(*arguments: Any, **options: Any) -> Any:
        loss = original(*arguments, **options)
        trainer.exact_losses.append(loss.item())
        return loss

    trainer.compute_loss = compute_loss
    trainer.train()
    return trainer


# Trainer -------------------------------------------------------------------------------------------------------------


def trainer_class(folder: Path) -> str:
    """A class by name, with its defaults; the schedule moves its learning rate."""
    trainer = train(folder, lowbit_optim.AdamW8bit, {"lr": 3e-3})
    optimizer = optimizer_of(trainer)
    assert type(optimizer) is lowbit_optim.AdamW8bit
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
    assert {param.dtype for param in trainer.model.parameters()} == {BF16}
    assert stored_as(optimizer.state_dict()) == {"torch.float32", "int8/b32/signed", "int8/b32/unsigned"}
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert rates[0] == 0, rates
    assert max(rates) == 3e-3, rates
    return assert_learning(losses(trainer))


def trainer_resume(folder: Path) -> str:
    """The example, with a preset: resumed, it ends with the bits of an undisturbed run."""
    main = example("trainer").main
    notes = []
    for preset in ("balanced", "minimal", "reference"):
        whole = resumes(main, folder / preset, "--preset", preset)
        # The last loss is taken before the last step; the next one is what the resumed optimizer would see.
        notes.append(f"{preset}: {assert_learning(losses(whole))}")
        # What Trainer wrote is loaded as Trainer does it.
        saved = load(folder / preset / f"checkpoint-{SAVED}/optimizer.pt")
        assert {float(entry["step"]) for entry in saved["state"].values()} == {SAVED}
    return "; ".join(notes)


def trainer_equals_torch(folder: Path) -> str:
    """With fp32 weights and state, losses and weights are those of torch.optim.AdamW up to rounding."""
    ours = train(folder, lowbit_optim.AdamW, {"lr": 3e-3, "state": "fp32"}, torch.float32)
    torchs = train(folder, torch.optim.AdamW, {"lr": 3e-3}, torch.float32)
    for mine, theirs in zip(ours.model.parameters(), torchs.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    return f"losses apart by {assert_close(ours.exact_losses, torchs.exact_losses, 1e-6):.0e}"


def trainer_accumulates(folder: Path) -> str:
    """Accumulated gradients, clipped, give the losses that they give torch.optim.AdamW."""
    settings = {"gradient_accumulation_steps": 3, "max_grad_norm": 0.5, "per_device_train_batch_size": 4}
    ours = train(folder, lowbit_optim.AdamW, {"lr": 3e-3, "state": "fp32"}, torch.float32, **settings)
    torchs = train(folder, torch.optim.AdamW, {"lr": 3e-3}, torch.float32, **settings)
    note = f"losses apart by {assert_close(ours.exact_losses, torchs.exact_losses, 1e-6):.0e}"
    counts = {float(entry["step"]) for entry in optimizer_of(ours).state_dict()["state"].values()}
    assert counts == {STEPS}, counts
    assert_learning(losses(train(folder, lowbit_optim.AdamW, {"lr": 3e-3, "preset": "compact"}, **settings)))
    return note


def trainer_parameter_policy(folder: Path) -> str:
    """Groups of one's own come as `params` among the arguments: here embeddings keep fp32 state."""
    make = example("trainer").make_trainer
    model_of = example("trainer").small_llama
    model = model_of(BF16)
    options = {"params": lowbit_optim.param_policy(model), "lr": 3e-3, "preset": "light"}
    trainer = make(folder, (lowbit_optim.AdamW, options), BF16, max_steps=STEPS, save_strategy="no")
    trainer.model = trainer.model_wrapped = model
    trainer.train()
    optimizer = optimizer_of(trainer)
    assert optimizer.state[model.model.embed_tokens.weight]["exp_avg"].dtype == torch.float32
    assert optimizer.state[model.model.layers[0].mlp.up_proj.weight]["exp_avg"].spec == "int8/b32/signed"
    return assert_learning(losses(trainer))


def refused(kind: type[Exception], message: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """Check that a call fails as the documentation says."""
    try:
        function(*arguments, **options)
    except kind as error:
        if message not in str(error):
            raise
    else:
        raise AssertionError(f"{function.__name__} works by now: change the documentation")


def trainer_names(folder: Path) -> str:
    """What `optim=` and its relatives do with a class, a name and a factory, as the documentation says."""
    from transformers import TrainingArguments

    for given in ("lowbit_adamw", lowbit_optim.AdamW8bit, "lowbit_optim.AdamW8bit"):
        refused(ValueError, "is not a valid OptimizerNames", TrainingArguments, output_dir=str(folder), optim=given)
    missing = "from_preset() missing 1 required positional argument: 'params'"
    refused(TypeError, missing, train, folder, lowbit_optim.from_preset, {"preset": "light"})
    trainer = train(folder, lowbit_optim.AdamW, {}, learning_rate=1e-5, max_steps=1)
    assert optimizer_of(trainer).defaults["lr"] == 1e-3  # the class's own, not TrainingArguments.learning_rate
    return "optim= takes names that transformers knows, and nothing else"


# PEFT and TRL --------------------------------------------------------------------------------------------------------


def lora(folder: Path) -> str:
    """An adapter in fp32, resumed bit for bit; the base model does not move and has no state."""
    trainer = resumes(example("lora").main, folder / "fp32")
    optimizer = optimizer_of(trainer)
    trained = {name: param for name, param in trainer.model.named_parameters() if param.requires_grad}
    assert all("lora_" in name for name in trained)
    assert {param.dtype for param in trained.values()} == {torch.float32}
    assert optimizer.state.keys() == set(trained.values())
    base = {
        name.replace(".base_layer", "").removeprefix("base_model.model."): param for name, param in base_of(trainer)
    }
    for name, param in example("trainer").small_llama(BF16).named_parameters():
        assert torch.equal(param, base[name]), name
    # All matrices of this adapter are below 4,096 elements.
    assert stored_as(optimizer.state_dict()) == {"torch.float32"}
    # A warm-up begins at lr 0, and half of the adapter with zero gradients; each step counts, as torch counts.
    assert {float(entry["step"]) for entry in optimizer.state.values()} == {STEPS}
    return f"{assert_learning(losses(trainer))}, {optimizer.memory_bytes():,} bytes of state"


def base_of(trainer: Any) -> list[tuple[str, torch.Tensor]]:
    return [(name, param) for name, param in trainer.model.named_parameters() if not param.requires_grad]


def lora_bf16(folder: Path) -> str:
    """An adapter in bf16 with correction bits, its small matrices quantized too; the Trainer cannot resume it."""
    main = example("lora").main
    options = [
        "--output",
        str(folder),
        "--adapters",
        "bf16",
        "--min-quantized-numel",
        "256",
        "--save-every",
        str(SAVED),
    ]
    trainer = main([*options, "--steps", str(STEPS)])
    optimizer = optimizer_of(trainer)
    trained = [param for param in trainer.model.parameters() if param.requires_grad]
    assert {param.dtype for param in trained} == {BF16}
    assert all("correction" in entry for entry in optimizer.state.values())
    assert {"int8/b32/signed", "int8/b32/unsigned"} < stored_as(optimizer.state_dict())
    # Resuming, the Trainer has PEFT load the adapter, which makes it fp32.
    message = "the state dict has correction, which adamw does not use with 'nearest' weights"
    refused(ValueError, message, main, [*options, "--steps", str(STEPS + 1), "--resume"])
    return f"{assert_learning(losses(trainer))}, {optimizer.memory_bytes():,} bytes of state"


def sft(folder: Path) -> str:
    """TRL's SFTTrainer, resumed bit for bit."""
    trainer = resumes(example("sft").main, folder)
    assert {param.dtype for param in trainer.model.parameters()} == {BF16}
    assert "int8/b32/signed" in stored_as(optimizer_of(trainer).state_dict())
    return assert_learning(losses(trainer))


# accelerate ----------------------------------------------------------------------------------------------------------

LOOP = FOLDER / "accelerate_loop.py"
LOSS = r"step +\d+ loss (\S+)"


def printed(*options: object, folder: Path) -> list[float]:
    """Start the loop on two processes and return its losses. `accelerate launch` wants MPI for several on a CPU."""
    launch = ("env", "ACCELERATE_USE_CPU=true", "torchrun", "--standalone", "--nproc-per-node=2")
    always = ("--steps", STEPS, "--save-at", SAVED, "--output", folder)
    return floats(LOSS, shell(*launch, LOOP, *always, *options, folder=folder))


def accelerate_loop(folder: Path) -> str:
    """A loop with accumulation and clipping, saved and resumed: weights and state have the same bits."""
    module = example("accelerate_loop")
    found = []
    for extra in ([], ["--resume"]):
        accelerator = module.Accelerator(gradient_accumulation_steps=2, cpu=True)
        args = module.parse(["--output", str(folder), "--steps", str(STEPS), "--save-at", str(SAVED), *extra])
        with contextlib.redirect_stdout(io.StringIO()) as output:
            model, optimizer = module.train(args, accelerator)
        state = optimizer.optimizer.state_dict()
        found.append(({"model": dict(model.state_dict()), "optimizer": state}, floats(LOSS, output.getvalue())))
        module.Accelerator().free_memory()
    (whole, before), (resumed, after) = found
    assert_same(resumed, whole)
    assert after == before[SAVED:], (after, before)
    return assert_learning(before)


def accelerate_ddp(folder: Path) -> str:
    """The same loop on two processes (DDP, gloo), saved and resumed."""
    whole = printed(folder=folder)
    resumed = printed("--resume", folder=folder)
    assert resumed == whole[SAVED:], (resumed, whole)
    return assert_learning(whole)


def accelerate_fsdp2(folder: Path) -> str:
    """accelerate's FSDP2 on two processes; `fsdp2.py` says how it is made to run on a CPU, and compares all bits."""
    run = ("torchrun", "--standalone", "--nproc-per-node=2", Path(__file__).with_name("fsdp2.py"))
    text = shell(*run, "--steps", STEPS, "--save-at", SAVED, folder=folder)
    found = floats(LOSS, text)
    presets = re.findall(r"^resume (\w+)$", text, re.M)
    count = 2 * STEPS - SAVED
    assert len(found) == count * len(presets) > 0, text
    for place in range(len(presets)):
        losses = found[place * count : (place + 1) * count]
        assert losses[SAVED:STEPS] == losses[STEPS:], losses
        assert_learning(losses[:STEPS])
    return f"presets {', '.join(presets)}"


CASES: dict[str, Callable[[Path], str | None]] = {
    "trainer-class": trainer_class,
    "trainer-preset-resume": trainer_resume,
    "trainer-fp32-is-torch": trainer_equals_torch,
    "trainer-accumulate-clip": trainer_accumulates,
    "trainer-param-policy": trainer_parameter_policy,
    "trainer-optim-names": trainer_names,
    "peft-lora-fp32": lora,
    "peft-lora-bf16": lora_bf16,
    "trl-sft": sft,
    "accelerate": accelerate_loop,
    "accelerate-ddp": accelerate_ddp,
    "accelerate-fsdp2": accelerate_fsdp2,
}

"""A plan in the words of the Trainer of Hugging Face."""

import torch
from transformers import TrainingArguments

from limitformer.base.errors import InputError
from limitformer_papers.training.plan import Plan, processes

SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}


def arguments(plan: Plan, evaluates: bool) -> TrainingArguments:
    """The plan in the Trainer's words; it prints nothing and reports to nobody.

    Raises:
        InputError: bf16 on a device that has none.
    """
    try:
        found = made(plan, evaluates)
    except ValueError as error:
        if not plan.bf16:
            raise
        reason = str(error).splitlines()[0]
        raise InputError(f"bf16 cannot be had here: {reason} Nearest: bf16=False (--no-bf16).") from error
    if found.n_gpu > 1:  # without a launcher one process takes one GPU: `DataParallel` would multiply the batch
        found._n_gpu = 1
    return found


def made(plan: Plan, evaluates: bool) -> TrainingArguments:
    """The same, with whatever the Trainer says of it."""
    return TrainingArguments(
        output_dir=str(plan.folder / "checkpoints" / "unfinished"),
        max_steps=plan.steps,
        per_device_train_batch_size=plan.batch // processes(),
        learning_rate=plan.learning_rate,
        warmup_steps=plan.warmup,
        lr_scheduler_type=SCHEDULES[plan.schedule],
        weight_decay=plan.weight_decay,
        max_grad_norm=0.0 if plan.clip is None else plan.clip,
        seed=plan.seed,
        bf16=plan.bf16,
        use_cpu=not torch.cuda.is_available(),  # what else there may be (MPS) has not been tried
        logging_steps=plan.log_every,
        logging_nan_inf_filter=False,
        eval_strategy="steps" if evaluates else "no",
        eval_steps=plan.evaluate_every,
        save_strategy="steps",
        save_steps=plan.save_every,
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        remove_unused_columns=False,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
    )

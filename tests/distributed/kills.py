"""Callbacks that end this process by SIGKILL at a named point; given to the recipe by --trainer.callbacks."""

import os
import signal

from lightning.pytorch.callbacks import Callback

from prm import store


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class KillInStep(Callback):
    """After the backward pass of a step, before the optimizer moves."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer, *_):
        # DeepSpeed has no hook before its step, so there the kill comes right after the one before.
        if trainer.global_step == self.step and "deepspeed" in type(trainer.strategy).__name__.lower():
            kill()

    def on_before_optimizer_step(self, trainer, *_):
        if trainer.global_step == self.step:
            kill()


class KillInWriting(Callback):
    """While the resume state of a step is written: `files` of its files are there, and it has not its name yet."""

    def __init__(self, step: int, files: int) -> None:
        part = f"{os.sep}.{step}."
        write_json, sync_tree = store.write_json, store.sync_tree

        def killing_write(path, value):
            # rng.json comes third.
            if part in str(path) and files == 2:
                kill()
            return write_json(path, value)

        def killing_sync(path):
            if part in str(path) and files == 4:
                kill()
            return sync_tree(path)

        store.write_json, store.sync_tree = killing_write, killing_sync


class KillBetweenEpochs(Callback):
    """When an epoch has ended and the next one has not begun."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_train_epoch_end(self, trainer, *_):
        if trainer.current_epoch == self.epoch:
            kill()

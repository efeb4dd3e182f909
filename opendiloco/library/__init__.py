"""The library: DiLoCo around your own training loop. Every step of the inner optimizer counts as an inner step, and the
last inner step of the lease ends the outer step.

    with DiLoCo(model, inner_optimizer, run="diloco:tiny-qz3h…4a@/ip4/…") as diloco:
        for windows in diloco.batches():  # the run's text; or use your own
            loss = loss_of(model, windows)
            loss.backward()
            diloco.report(loss)
            inner_optimizer.step()
            inner_optimizer.zero_grad()

Or around transformers' `Trainer`:

    Trainer(model, arguments, train_dataset=…, callbacks=[DiLoCoCallback("diloco:tiny-qz3h…4a@/ip4/…")]).train()

Other rooms import:
the room: DiLoCo
"""

from opendiloco.library.loop import DiLoCo
from opendiloco.library.trainer import DiLoCoCallback

__all__ = ["DiLoCo", "DiLoCoCallback"]

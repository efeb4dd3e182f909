"""The model of a run: its construction, loss, layout in flat vectors, and export.

Build, loss and parameters import torch; export, layout and utilisation need none.

Other rooms import:
build: build_model, build_skeleton, initial_theta, sized_skeleton, with_sizes_named
export: CurvePoint, Dtype, RunFacts, export_model
layout: Layout, Parameter
loss: CompiledLoss, LEAST_LOGITS, fitting_logits, in_pieces_of, limit_logits, packing_known, positions_at_once,
    predicted_tokens, router_loss_weight, window_loss, with_forward
parameters: STAGED_VALUES, Shards, is_all_trained, layout_of, local_part, merge, multiplied_weights, pin, shard_rows,
    trainable, transformer_blocks
utilisation: Precision, flops_per_token, peak_tokens_per_second
"""

import logging
import os

os.environ["USE_HUB_KERNELS"] = "NO"  # stops some of transformers' architectures from downloading kernels
for _name in ("torchao", "torch.utils._pytree"):  # silences torchao, which transformers imports
    if not logging.getLogger(_name).level:
        logging.getLogger(_name).setLevel(logging.ERROR)

"""DiLoCo's arithmetic: the inner loop of a worker, the outer step of a peer, and both in one process (`reference`).

evaluation, inner, optimizers, reference, team and trials import torch. codec, moments_file, outer and streaming do not,
because the peer process uses them.

Other rooms import:
codec: BLOCK_VALUES, BlockCodec, Residual, RunRounding, block_bytes
evaluation: EVALUATED_AT_ONCE, generate_sample, held_out_loss
inner: InnerStep, InnerSteps, ModelReplica
moments_file: NO_STEP, digest_place, header_of, read_header
optimizers: FUSED_ON, check_inner_optimizer
outer: LocalState, OuterStepMeter, OuterState, OuterStepTaken, inner_learning_rate_factor
streaming: FragmentSchedule, FragmentWork
team: Team, choose_device, compiling_lacks, device_name, fill_untrained, forget_peak_memory, has_bf16, has_fast_fp16,
    has_other_tensors, peak_memory, shard_model
trials: compile_blocks, compiled_blocks, document_attention, enlarge_micro_batch, fitting_micro_batch,
    keep_compiled_if_it_works
"""

"""The tables of `run.toml`: their keys, the checks on each value, and the error messages. Needs no torch.

Other rooms import:
data: BYTE_TOKENIZER_SIZE, DataSection, MixturePhase, STANDARD_LIBRARY, SourceSection, TokenizerSection
model: ModelSection, check_initial_weights, digest_of_weights, read_model_values
overrides: NO_OVERRIDES, Overrides, bare_in_words, mixture_phases, value_in_words, why_not_followed
optimizers: AdafactorSection, AdamWSection, AdamWSettings, InnerOptimizerSection, MuonSection, OuterOptimizerSection,
    OuterScheduleSection, TorchSection
run_config: AboutSection, CodecSection, EvaluationSection, RunConfig, SPARSE_ERROR_FEEDBACK, StreamingSection,
    TrainingSection, misfit
section: Digest, Name, NotNegativeFloat, Positive, Section, describe_validation_error, read_toml
"""

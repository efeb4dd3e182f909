"""The training data of a run: documents, their token ids, and the order of the samples cut from them. No module of this
package imports torch.

Other rooms import:
ahead: AheadTokenizer
hub: CONFIG, MODEL_FILES, check_weights, is_local_path, model_values, pretrained_folder
own_files: NONE, OwnFiles, is_here, is_local, local_sources, volunteered, with_paths_marked
sample_order: Batches, HeldOutWindows, SampleOrder, numbers_of
token_files: Piece, TokenCache, is_token_folder, most_tokens_in_memory, read_about, write_token_folder
tokenizer: ByteTokenizer, Tokenizer, build_tokenizer, digest_of_tokenizer
training_data: TokenizeAhead, TokenizedSource, TrainingData, check_share, load_data
"""

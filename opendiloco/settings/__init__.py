"""What a machine's owner can set, each setting defined once: as option, environment variable and key of a file.

Other rooms import:
file: default_settings_path, read_settings_file, unknown_variables, without_settings
join_settings: JoinSettings, LogSettings, SECTIONS, split_address
setting: Setting, model_of, settings_of
"""

"""What a machine's owner can set, each setting defined once: as option, environment variable and key of a file.

Other rooms import:
join_settings: JoinSettings, LogSettings, SECTIONS, default_settings_path, read_settings_file, split_address,
    unknown_variables, without_settings
setting: Setting, model_of, settings_of
"""

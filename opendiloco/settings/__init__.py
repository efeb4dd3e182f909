"""What a machine's owner can set, each setting defined once: as option, environment variable and key of a file.

Other rooms import:
join_settings: JoinSettings, LogSettings, SECTIONS, Setting, default_settings_path, model_of, read_settings_file,
    settings_of, split_address, unknown_variables, without_settings
"""

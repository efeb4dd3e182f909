"""The settings of a machine's owner. One definition of a setting makes its option, its environment variable and its key
in the configuration file.

Other rooms import:
join_settings: JoinSettings, LogSettings, SECTIONS, Setting, default_settings_path, model_of, read_settings_file,
    settings_of, split_address, unknown_variables, unread_variables, without_settings
"""

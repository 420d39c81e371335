def parse_args(config, method, hyperparameters):
    config[method] = hyperparameters([]) if hyperparameters else {}
    return config

def sgd(rate):
    return rate

from src.server.fedavg import FedAvgServer


class pFedLAServer(FedAvgServer):
    @staticmethod
    def get_hyperparams(arguments):
        return {"k": 0}

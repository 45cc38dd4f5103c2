from autoparallel.report.predict import Prediction as Prediction


def explain(plan) -> str:
    return plan.to_json()

"""Which experts a token is sent to (Mixtral, 2024; DeepSeek-V2, 2024; DeepSeek-V3, 2024), and with what weights."""
import numpy as np

from formats import File

SOFTMAX, SIGMOID = 0, 1
BEST, BEST_TWO = 0, 1


def best(scores, count):
    """Indices by falling score, the lower index first where scores are equal."""
    return np.argsort(-scores, kind="stable")[:count]


def check_margins(scores, parts, count, error):
    """Scores that decide are equal since all that they are made of is, or further apart than fp32 could confuse."""
    order = best(scores, count + 1)
    for a, b in zip(order, order[1:]):
        if np.isfinite(scores[b]):
            assert (parts[a] == parts[b]).all() or scores[a] - scores[b] > 1e-5 * abs(scores[b]) + error


def route(logits, bias, p):
    """ids and weights of one token."""
    if p["scoring"] == SOFTMAX:
        scores = np.exp(logits - logits.max())
        scores /= scores.sum()
    else:
        scores = 1 / (1 + np.exp(-logits))
    choice = scores if bias is None else scores + bias
    parts = np.stack([logits, np.zeros_like(logits) if bias is None else bias], 1)
    error = 0 if bias is None else 2e-6  # where a sum may be near zero
    if p["n_group"] > 1:
        groups = choice.reshape(p["n_group"], -1)
        order = np.sort(groups, 1)[:, ::-1]
        group_scores = order[:, 0] if p["group_score"] == BEST else order[:, 0] + order[:, 1]
        check_margins(group_scores, order[:, :1 + p["group_score"]], p["topk_group"], error)
        keep = np.isin(np.arange(p["n_group"]), best(group_scores, p["topk_group"]))
        choice = np.where(np.repeat(keep, groups.shape[1]), choice, -np.inf)
    check_margins(choice, parts, p["top_k"], error)
    ids = best(choice, p["top_k"])
    weights = scores[ids]
    if p["renormalise"]:
        weights = weights / (weights.sum() + 1e-20)
    return ids, weights * p["scaling"]


def routing():
    rng = np.random.default_rng(707)
    file = File("experts of tokens and their weights",
                "tokens experts top_k scoring has_bias n_group topk_group group_score renormalise", "scaling")

    def case(name, tokens, experts, top_k, scoring, renormalise, groups=(1, 1), group_score=BEST, bias=0.0, scaling=1.0,
             step=0.0, shift=0.0):
        p = {"tokens": tokens, "experts": experts, "top_k": top_k, "scoring": scoring, "has_bias": int(bias > 0),
             "n_group": groups[0], "topk_group": groups[1], "group_score": group_score, "renormalise": renormalise,
             "scaling": scaling}
        for _ in range(1000):  # until no two scores that decide are too near
            logits = rng.standard_normal((tokens, experts)) * 2
            biases = rng.standard_normal(experts) * bias
            if step:  # a coarse grid: ties
                logits, biases = np.rint(logits / step) * step, np.rint(biases / step) * step
            logits, biases = (logits + shift).astype(np.float32), biases.astype(np.float32)
            try:
                rows = [route(row.astype(np.float64), biases.astype(np.float64) if bias else None, p) for row in logits]
                break
            except AssertionError:
                continue
        else:
            raise AssertionError(f"{name}: scores are always too near")
        ids, weights = (np.array(part) for part in zip(*rows))
        tensors = {"logits": logits, "ids": ids.astype(np.int32), "weights": weights.astype(np.float32)}
        file.case(name, p, {**tensors, "bias": biases} if bias else tensors)

    case("mixtral: softmax of the chosen", 6, 8, 2, SOFTMAX, 1)
    case("mixtral, ties", 6, 8, 2, SOFTMAX, 1, step=1.0)
    case("qwen3-moe, normalised", 2, 128, 8, SOFTMAX, 1)
    case("qwen3-moe, not normalised", 3, 64, 4, SOFTMAX, 0)
    case("softmax, logits near 1000", 3, 16, 4, SOFTMAX, 0, step=0.25, shift=1000.0)
    case("deepseek-v2-lite: greedy", 2, 64, 6, SOFTMAX, 0)
    case("deepseek-v2: groups by their best", 2, 160, 6, SOFTMAX, 0, (8, 3), BEST, scaling=16.0)
    case("deepseek-v2, ties of groups", 4, 32, 6, SOFTMAX, 0, (8, 3), BEST, scaling=16.0, step=1.0)
    case("deepseek-v3: groups by their best two", 2, 256, 8, SIGMOID, 1, (8, 4), BEST_TWO, bias=0.2, scaling=2.5)
    case("deepseek-v3, ties", 4, 32, 4, SIGMOID, 1, (4, 2), BEST_TWO, bias=0.5, scaling=2.5, step=0.5)
    case("deepseek-v3, biases below zero win by groups", 3, 16, 4, SIGMOID, 1, (4, 1), BEST_TWO, bias=2.0, scaling=2.5)
    case("one group with bias, not normalised", 2, 64, 8, SIGMOID, 0, bias=0.3)
    case("sigmoid, every expert", 2, 4, 4, SIGMOID, 1, scaling=1.5)
    return file

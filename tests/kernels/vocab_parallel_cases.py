"""What each rank of test_vocab_parallel.py does; spawned processes import it as
terrella.tests.kernels.vocab_parallel_cases.
"""

import datetime

import torch
import torch.distributed as dist

from terrella.kernels import PolicySettings, PolicyTerms, linear_logprob, linear_policy_loss, token_logprob
from terrella.kernels import logprob as logprob_module

SETTINGS = {
    "token": PolicySettings(temperature=0.8, clip_high=0.28, kl_clamp=10.0),
    "gspo": PolicySettings(ratio="sequence"),
}


def make_case(rows=24, hidden=6, padded=20, vocab=17):
    torch.manual_seed(0)
    h, w = torch.randn(rows, hidden, dtype=torch.float64) * 2, torch.randn(padded, hidden, dtype=torch.float64)
    targets = torch.randint(vocab, (rows,))
    targets[0], targets[1] = 0, vocab - 1
    w[3] = h[2] * 4  # a confident token, on the first shard
    targets[2] = 3
    weight = lambda: torch.rand(rows, dtype=torch.float64) * (torch.rand(rows) < 0.8)  # noqa: E731
    terms = PolicyTerms(
        ce_weight=weight(),
        pg_weight=weight(),
        kl_weight=weight(),
        entropy_weight=weight(),
        advantage=torch.randn(rows, dtype=torch.float64),
        old_logprob=-torch.rand(rows, dtype=torch.float64) * 3,
        ref_logprob=-torch.rand(rows, dtype=torch.float64) * 3,
    )
    return h, w, targets, terms, torch.arange(rows) // 6, vocab


def whole(name):
    """Values and gradients on one process, over the unsplit vocabulary."""
    h, w, targets, terms, doc, vocab = make_case()
    h.requires_grad_()
    w.requires_grad_()
    out = {}
    logp, entropy = linear_logprob(h, w, targets, entropy=True, temperature=0.7, vocab_size=vocab)
    out["logprob"], out["entropy"] = logp.detach(), entropy.detach()
    out["dh"], out["dw"] = torch.autograd.grad((logp * terms.advantage + entropy).sum(), (h, w))
    loss = linear_policy_loss(h, w, targets, terms, SETTINGS[name], doc_N=doc, vocab_size=vocab)
    out["loss"], out["policy_logprob"] = loss.loss.detach(), loss.logprob_N
    out["policy_dh"], out["policy_dw"] = torch.autograd.grad(loss.loss, (h, w))
    logits = (h @ w.T).detach().requires_grad_()
    logp, entropy = token_logprob(logits, targets, entropy=True, vocab_size=vocab)
    out["dlogits"] = torch.autograd.grad((logp * terms.advantage + entropy).sum(), logits)[0]
    return out


def rank_main(rank, world, rendezvous, folder):
    """The same on one shard; the gathers are counted."""
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=600)
    )
    group = dist.new_group(list(range(world)))
    gathered, plain = [], logprob_module.gather_stats

    def counting(stats, group):
        gathered.append(stats.shape[-1])
        return plain(stats, group)

    logprob_module.gather_stats = counting
    results = {}
    for name in SETTINGS:
        h, w, targets, terms, doc, vocab = make_case()
        columns = len(w) // world
        part = slice(rank * columns, (rank + 1) * columns)
        shard = w[part].clone().requires_grad_()
        h.requires_grad_()
        out = {}
        gathered.clear()
        logp, entropy = linear_logprob(h, shard, targets, entropy=True, temperature=0.7, vocab_size=vocab, group=group)
        out["gathers"] = list(gathered)
        out["logprob"], out["entropy"] = logp.detach(), entropy.detach()
        out["dh"], out["dw"] = torch.autograd.grad((logp * terms.advantage + entropy).sum(), (h, shard))
        loss = linear_policy_loss(h, shard, targets, terms, SETTINGS[name], doc_N=doc, vocab_size=vocab, group=group)
        out["loss"], out["policy_logprob"] = loss.loss.detach(), loss.logprob_N
        out["policy_dh"], out["policy_dw"] = torch.autograd.grad(loss.loss, (h, shard))
        logits = (h @ w.T).detach()[:, part].clone().requires_grad_()
        logp, entropy = token_logprob(logits, targets, entropy=True, vocab_size=vocab, group=group)
        out["dlogits"] = torch.autograd.grad((logp * terms.advantage + entropy).sum(), logits)[0]
        results[name] = out
    torch.save(results, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


def on_one_gpu(name, group):
    """`whole` in fp32 on CUDA, through `group` when there is one."""
    h, w, targets, terms, doc, vocab = make_case()
    h, w = (v.float().cuda().requires_grad_() for v in (h, w))
    targets, doc = targets.cuda(), doc.cuda()
    terms = PolicyTerms(**{k: v.float().cuda() for k, v in vars(terms).items() if v is not None})
    out = {}
    out["logprob"], out["entropy"] = linear_logprob(
        h, w, targets, entropy=True, temperature=0.7, vocab_size=vocab, group=group
    )
    out["dh"], out["dw"] = torch.autograd.grad((out["logprob"] * terms.advantage + out["entropy"]).sum(), (h, w))
    loss = linear_policy_loss(h, w, targets, terms, SETTINGS[name], doc_N=doc, vocab_size=vocab, group=group)
    out["loss"], out["policy_logprob"] = loss.loss, loss.logprob_N
    out["policy_dh"], out["policy_dw"] = torch.autograd.grad(loss.loss, (h, w))
    logits = (h @ w.T).detach().requires_grad_()
    logp, entropy = token_logprob(logits, targets, entropy=True, vocab_size=vocab, group=group)
    out["dlogits"] = torch.autograd.grad((logp * terms.advantage + entropy).sum(), logits)[0]
    return {k: v.detach() for k, v in out.items()}

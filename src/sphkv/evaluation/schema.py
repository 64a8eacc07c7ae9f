# SPDX-License-Identifier: Apache-2.0
"""What a record holds, field by field.

A record file has ``run`` lines, which say how the points after them were measured, and ``point``
lines. These types are what writers build and what ``validate.py`` compares a file with.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

FORMAT = "sphkv-records-2"
"""Since 2 text is decoded under the budget and a point is labelled by its peak bytes."""

CERTIFICATE_FORMAT = "sphkv-certificate-2"
"""Since 2 a certificate names its split and failure classes say whether they were recovered."""


PLACE_FIELDS = ("device", "dtype", "backend", "page_tokens")
"""Fields of an identity that say where a point was measured; older records lack some of them."""


class MethodDescription(TypedDict):
    """What a cache chose under its budget.

    Attributes:
        name: Label of the method.
        setting: Tier, bits or sizes it took; never empty.
        residency: ``uniform`` or ``retention`` of ours, ``own`` of another method.
        tiers: Share of the states that each tier holds; what is missing to 1 was dropped.
        realisation: ``kernel-realized`` if decode reads what is stored, else ``format-only``.
    """

    name: str
    setting: str
    residency: str
    tiers: dict[str, float]
    realisation: str


class StepColumns(TypedDict):
    """Bytes of every pass after the prompt, one list per column.

    Attributes:
        num_tokens: Tokens stored after the pass.
        before: Resident bytes before it.
        peak: Most resident bytes inside it.
        after: Resident bytes after it.
        limit: Bytes the budget allows at the first token of the pass.
    """

    num_tokens: list[int]
    before: list[int]
    peak: list[int]
    after: list[int]
    limit: list[int]


class Memory(TypedDict):
    """Bytes of a point.

    Attributes:
        active_tokens: Tokens stored at the end.
        ledger: Resident bytes at the end, by kind.
        b_kv: Resident bytes per token at the highest moment of any pass; the point's label.
        b_kv_mean: Resident bytes per token after a pass, mean over passes.
        b_kv_tables: Bytes of codebooks per token at the end; not part of the others.
        eta_meta: Share of the bytes at the end that is not payload.
        stored_bytes: Resident bytes after the prompt was stored.
        peak_bytes: Most resident bytes inside any pass.
        peak_share: Highest resident bytes over what the budget allows there.
        dense_share: Highest resident bytes over those of a dense cache there.
        table_bytes: Bytes of codebooks, which all sequences share.
        b_hbm: Bytes that one step moves.
        b_hbm_source: ``counted`` or ``profiled``.
        setting: See ``MethodDescription``.
        residency: See ``MethodDescription``.
        tiers: See ``MethodDescription``.
        realisation: See ``MethodDescription``.
        steps: Bytes of every pass.
    """

    active_tokens: int
    ledger: dict[str, int]
    b_kv: float
    b_kv_mean: float
    b_kv_tables: float
    eta_meta: float
    stored_bytes: int
    peak_bytes: int
    peak_share: float
    dense_share: float
    table_bytes: int
    b_hbm: int
    b_hbm_source: str
    setting: str
    residency: str
    tiers: dict[str, float]
    realisation: str
    steps: StepColumns


class DistanceBins(TypedDict):
    """Divergence by distance from the prompt.

    Attributes:
        edges: Last distance, in tokens, of every bin; the first bin begins at 1.
        tokens: Tokens of each bin.
        kl: Their mean divergence in nats; None of an empty bin.
    """

    edges: list[int]
    tokens: list[int]
    kl: list[float | None]


class Verdicts(TypedDict):
    """Whether a text is continued as well as with the dense cache, by two rules.

    Attributes:
        kl: Mean divergence at most ``KL_TOLERANCE``.
        nll: Loss at most ``NLL_TOLERANCE`` above that of dense.
    """

    kl: bool
    nll: bool


class KLSummary(TypedDict):
    """Two runs of a model over the same tokens, in nats.

    Attributes:
        kl: Mean divergence from the exact model.
        kl_without_worst: The same without the worst token.
        kl_p95: 95% quantile.
        kl_max: Worst token.
        kl_by_distance: Means by distance from the prompt.
        kl_counts: Tokens by divergence.
        nll: Mean loss on the true next tokens.
        nll_dense: The same of the exact model.
        nll_delta: Their difference.
        same_top1: Share of tokens with the same best next token.
        num_tokens: Tokens compared.
        verdicts: By divergence and by loss.
    """

    kl: float
    kl_without_worst: float
    kl_p95: float
    kl_max: float
    kl_by_distance: DistanceBins
    kl_counts: list[int]
    nll: float
    nll_dense: float
    nll_delta: float
    same_top1: float
    num_tokens: int
    verdicts: Verdicts


class MarginCounts(TypedDict):
    """Changed best tokens by how sure the exact model was.

    Attributes:
        tokens: Tokens by margin.
        tipped: Of these, with another best token.
        drift: Predicted drift at the end; of a controller only.
        margins: Margin of every token; of a controller only.
        tipped_at: Tokens with another best token, counted from 0; of a controller only.
    """

    tokens: list[int]
    tipped: list[int]
    drift: NotRequired[float]
    margins: NotRequired[list[float]]
    tipped_at: NotRequired[list[int]]


class TextQuality(KLSummary):
    """A text that was continued.

    Attributes:
        by_margin: See ``MarginCounts``.
    """

    by_margin: MarginCounts


class AnswerQuality(TypedDict):
    """A greedy answer, and answers over seeds where they were asked for.

    Attributes:
        answer: The text.
        reference_answer: The exact model's.
        f1: Against the true answers.
        f1_reference: The exact model's.
        agreement_f1: Against the exact model's answer.
        em: Whether it is a true answer.
        found: Whether it begins with one.
        found_reference: The exact model's.
        is_same: Whether its tokens are the exact model's.
        length: Tokens.
        length_drift: Tokens more than the exact model's.
        is_ended: Whether the model ended it.
        failures: What went wrong that did not with the exact model.
        kl: Mean divergence while both answers agree.
        sampled: Scores of sampled answers.
        sampled_reference: The exact model's.
        s_traj: Variance of these scores.
        s_traj_reference: The exact model's.
    """

    answer: str
    reference_answer: str
    f1: float
    f1_reference: float
    agreement_f1: float
    em: float
    found: float
    found_reference: NotRequired[float]
    is_same: float
    length: int
    length_drift: int
    is_ended: float
    failures: list[str]
    kl: float
    sampled: NotRequired[list[float]]
    sampled_reference: NotRequired[list[float]]
    s_traj: NotRequired[float]
    s_traj_reference: NotRequired[float]


class EpisodeQuality(TypedDict):
    """An episode of tool use beside the exact model's.

    Attributes:
        success: Whether the task was solved.
        success_reference: The same of the exact model.
        schema_validity: Share of statements that ran.
        actions: The statements.
        is_same: Whether they are the exact model's.
        length: Tokens.
        length_drift: Tokens more than the exact model's.
        is_ended: Whether the model ended every statement.
        failures: What went wrong that did not with the exact model.
    """

    success: float
    success_reference: float
    schema_validity: float
    actions: list[str]
    is_same: float
    length: int
    length_drift: int
    is_ended: float
    failures: list[str]


class Times(TypedDict):
    """Seconds; the only part of a point that differs when it is measured again.

    Attributes:
        t_prefill_s: Dense pass over the prompt.
        t_allocate_write_s: Deciding, encoding and writing.
        t_decode_s: All timed steps.
        ttft_s: Until the first token.
        num_measured: Steps after the warm-up.
        decode_s: All of them.
        tok_s: One over the median step; None without a measured step.
        step_p50_s: Median step.
        step_p95_s: 95% quantile.
        attend_s: Seconds of the measured steps inside the cache.
    """

    t_prefill_s: float
    t_allocate_write_s: float
    t_decode_s: float
    ttft_s: float
    num_measured: int
    decode_s: float
    tok_s: float | None
    step_p50_s: float | None
    step_p95_s: float | None
    attend_s: float | None


class Result(TypedDict):
    """What measuring a case gives.

    Attributes:
        quality: By workload.
        memory: Bytes.
        times: Seconds.
        allocation: Where a controller spent its bytes; of texts only.
    """

    quality: TextQuality | AnswerQuality | EpisodeQuality
    memory: Memory
    times: Times
    allocation: NotRequired[dict[str, Any]]


class Identity(TypedDict):
    """What makes a point this point and no other.

    Attributes:
        model: The model.
        workload: ``lm``, ``qa``, ``needle`` or ``tools``.
        case: Name of the prompt.
        split: ``development``, ``test``, or empty for text of no split.
        prompt: Hash of its token ids.
        following: Hash of the token ids after it; empty if there are none.
        context: Tokens of the prompt.
        num_following: Tokens after it.
        max_new_tokens: Most tokens of an answer.
        window: How decoding was timed.
        seed: Draws what is drawn.
        calibration: Names the codebooks.
        method: Name of the method.
        budget: As it was asked for.
        policy: Names the controller's weights; empty for other methods.
        num_seeds: Sampled answers.
        device: Where methods ran.
        dtype: Type of the weights.
        backend: What decoded our methods' pages.
        page_tokens: States of a coded page of the controller's; 0 of a method without them.
    """

    model: str
    workload: Literal["lm", "qa", "needle", "tools"]
    case: str
    split: str
    prompt: str
    following: str
    context: int
    num_following: int
    max_new_tokens: int
    window: dict[str, int]
    seed: int
    calibration: str
    method: str
    budget: str
    policy: str
    num_seeds: int
    device: NotRequired[str]
    dtype: NotRequired[str]
    backend: NotRequired[str]
    page_tokens: NotRequired[int]


class Point(Identity):
    """A line of a record file: one prompt, method and budget.

    Attributes:
        kind: ``point``.
        run: Names its run line.
        id: Hash of the identity.
        facets: What the prompt stands for.
        status: ``measured``, or ``refused`` where the budget is too small for the method.
        reason: Why it was refused.
        quality: None if refused.
        memory: None if refused.
        times: None if refused.
        allocation: See ``Result``.
    """

    kind: Literal["point"]
    run: str
    id: str
    facets: dict[str, Any]
    status: Literal["measured", "refused"]
    reason: str
    quality: TextQuality | AnswerQuality | EpisodeQuality | None
    memory: Memory | None
    times: Times | None
    allocation: NotRequired[dict[str, Any]]


class Setup(TypedDict):
    """With what points were measured.

    Attributes:
        model: The model.
        model_shape: Shape of its cache.
        dense_bytes_per_token: Bytes of a dense cache per token.
        seed: Draws what is drawn.
        window: How decoding was timed.
        decode: Greedy, batch 1.
        substrate: Pages, device, types, backend.
        tiers: Tiers that one-tier caches choose from.
        controller_tiers: Tiers that the controller chooses from.
        calibration: Text and size.
        timing: Clock.
        environment: Hardware, versions, commit.
    """

    model: str
    model_shape: dict[str, Any]
    dense_bytes_per_token: int
    seed: int
    window: dict[str, int]
    decode: dict[str, Any]
    substrate: dict[str, Any]
    tiers: list[dict[str, Any]]
    controller_tiers: NotRequired[list[dict[str, Any]]]
    calibration: dict[str, Any]
    timing: dict[str, str]
    environment: dict[str, Any]


class Run(TypedDict):
    """A line of a record file that says how the points after it were measured.

    Attributes:
        kind: ``run``.
        format: ``FORMAT``.
        run: Hash of the setup.
        setup: The setup.
    """

    kind: Literal["run"]
    format: str
    run: str
    setup: Setup


class FailureRow(TypedDict):
    """One of the paper's failure classes, under its trigger and after its fix.

    Attributes:
        failure: Its name.
        mechanism: What goes wrong.
        budget: At which it was examined.
        num_prompts: Prompts examined.
        num_shown: Prompts on which dense has what may be lost; 0 if all were examined in vain.
        is_triggered: Whether the failure showed.
        is_recovered: Whether the fix made nothing worse and something better.
        drift_trigger: Mean divergence from dense's answers, in nats.
        drift_fix: The same after the fix, as all that end so.
        lost_trigger: Answers that lost what dense's have.
        lost_fix: After the fix.
        delta_t_trigger: Mean difference of answers' lengths, in tokens.
        delta_t_fix: After the fix.
        s_traj_trigger: Mean variance over sampled answers of having the property.
        s_traj_fix: After the fix.
        cost_bytes_per_token: Bytes that the fix pins.
    """

    failure: str
    mechanism: str
    budget: str
    num_prompts: int
    num_shown: int
    is_triggered: bool
    is_recovered: bool
    drift_trigger: float
    drift_fix: float
    lost_trigger: int
    lost_fix: int
    delta_t_trigger: float
    delta_t_fix: float
    s_traj_trigger: float
    s_traj_fix: float
    cost_bytes_per_token: float


class WitnessRow(TypedDict):
    """One judged behaviour of a certificate.

    Attributes:
        name: What is watched.
        value: The method's figure.
        bound: The most that it may be.
        dense: Dense's figure, where there is one.
        exemplar: The worst example.
        is_held: Whether the figure is within its bound.
        is_mute: Whether dense itself fails, so that it shows nothing.
    """

    name: str
    value: float
    bound: float
    dense: float | None
    exemplar: str
    is_held: bool
    is_mute: bool


class Certificate(TypedDict):
    """What ``sphkv certify`` writes.

    Attributes:
        format: ``CERTIFICATE_FORMAT``.
        is_safe: Whether every witness holds.
        config: The operating point and how it was examined.
        witnesses: Every judged behaviour.
        prompts: Prompts of each witness.
        memory: Bytes and realisation; None if nothing could be stored.
        dense_bytes_per_token: Bytes of a dense cache per token.
        suite_id: Names the prompts.
        calibration_id: Names the codebooks.
        policy_id: Names the controller's weights.
        backend: What ran decode attention.
        environment: Hardware, versions, commit.
        stability: Figures over all answers; None if there are none.
        failures: The failure classes, if they were examined.
    """

    format: str
    is_safe: bool
    config: dict[str, Any]
    witnesses: list[WitnessRow]
    prompts: dict[str, int]
    memory: dict[str, Any] | None
    dense_bytes_per_token: int
    suite_id: str
    calibration_id: str
    policy_id: str
    backend: str
    environment: dict[str, Any]
    stability: dict[str, Any] | None
    failures: NotRequired[list[FailureRow]]

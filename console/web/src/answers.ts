// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

import { type Words, languages } from "./words";

// What a process answers, in Chinese. A * is a value; values keep their order. An error may
// follow after a colon: it stays as it is, because people search for it. The first that matches
// is taken.
const zh: [string, string][] = [
  ["ended", "已结束"],
  ["a new source", "新的消息源"],
  ["paused", "已暂停"],
  ["operator: Resume", "人工：恢复"],
  ["operator: Resume; time", "人工：恢复；或到时自动解除"],
  ["time", "到时自动解除"],

  ["storm: *", "风暴：*"],
  ["no storm: *", "无风暴：*"],
  ["detector off: *", "检测已关闭：*"],
  ["error rate * (* of *, *) * *, attempts * * *, age * * *, * diverted in *", "错误率 *（*/*，*）* *，尝试次数 * * *，时长 * * *，另有 * 次改道，在 * 内"],
  ["error rate * (* of *, *) * *, attempts * * *, age * * *", "错误率 *（*/*，*）* *，尝试次数 * * *，时长 * * *"],
  ["error rate unknown (under * outcomes), attempts * * *, age * * *, * diverted in *", "错误率未知（结果少于 * 个），尝试次数 * * *，时长 * * *，另有 * 次改道，在 * 内"],
  ["error rate unknown (under * outcomes), attempts * * *, age * * *", "错误率未知（结果少于 * 个），尝试次数 * * *，时长 * * *"],
  ["* of the fleet: * of * processes, * make one", "集群*：*/* 个进程，达到 * 个即成立"],
  ["the storm detector, when rate and age are back", "风暴检测：错误率和时长回落时"],
  ["the storm detectors of the processes in storm", "处于风暴中的各进程的风暴检测"],

  ["closed: *", "闭合：*"],
  ["open: *", "断开：*"],
  ["half-open: *", "半开：*"],
  ["its own probes", "自身的探测"],
  ["operator: ForceClosed; its own probes after the period", "人工：闭合熔断器；到时后自身的探测"],
  ["a wider scope is open: *: *", "更大的范围 * 处于断开：*"],
  ["the probes of that scope's other children", "该范围内其他成员的探测"],
  ["held by the fleet: * was taken over: *; * processes heard, * decide", "由集群决定：* 已被接管：*；有应答的进程 * 个，* 个即可决定"],
  ["held by the fleet: * is open, period *: *; * processes heard, * decide", "由集群决定：* 断开，第 * 个周期：*；有应答的进程 * 个，* 个即可决定"],
  ["the fleet, when it has told or the period is over; operator: ForceClosed", "集群：通知到达或周期结束时；人工：闭合熔断器"],
  ["the fleet's probes, one process at a time; operator: ForceClosed", "集群的探测，每次一个进程；人工：闭合熔断器"],

  ["* messages wait for the limit of dead letters", "* 条消息等待死信限额"],
  ["* messages have failed for good or are in quarantine, and the source has no dead-letter writer", "* 条消息已彻底失败或被隔离，而消息源没有死信写入器"],
  [
    "operator: open it with SourceConfig.DeadLetters set (an adapter's WithDeadLetters)",
    "人工：设置 SourceConfig.DeadLetters（适配器的 WithDeadLetters）后重新打开",
  ],
  ["* messages wait for a credit", "* 条消息等待死信额度"],
  ["successes, time, or operator: GrantCredits", "成功的处理、时间，或人工：增加死信额度"],
  ["* dead letters cannot be written", "* 条死信无法写入"],
  ["the dead-letter writer", "死信写入器"],
  ["* dead letters are put off", "* 条死信推迟写入"],
  ["the dead-letter writer, once it takes them", "死信写入器可以接收时"],

  ["asked for time", "处理程序要求等待"],
  ["rate limit", "限流"],
  ["draining at the ramp", "正按坡度排空"],
  ["* messages in the spill cannot be read", "磁盘暂存中有 * 条消息无法读取"],
  ["operator: see the log", "人工：查看日志"],
  ["the spill takes no message", "磁盘暂存无法再写入"],
  ["room on the disk, or in SpillBytes", "磁盘有空间，或 SpillBytes 有余量"],
  ["window full: * messages are settled behind one that waits", "窗口已满：* 条已确认的消息排在一条等待的消息之后"],
  ["window full", "窗口已满"],
  ["the oldest message in it", "其中最早的消息"],
  ["the messages in it", "其中的消息"],

  ["breaker opened", "熔断器断开"],
  ["breaker closed", "熔断器闭合"],
  ["storm began", "风暴开始"],
  ["storm ended", "风暴结束"],
  ["dead letters", "死信"],
  ["order", "指令"],
  ["order refused", "指令被拒绝"],

  ["attempts", "尝试次数用尽"],
  ["permanent", "处理程序判定"],
  ["poison-head", "阻塞了消息源"],
  ["guess", "推断"],
  ["last-delivery", "最后一次投递"],
  ["quarantine", "已隔离"],

  ["rate", "错误率过高"],
  ["run", "连续失败"],
  ["slow", "调用过慢"],
  ["probe", "探测失败"],
  ["probe lost", "探测没有结果"],
  ["quorum", "多数进程的判断"],
  ["released", "解除强制"],
  ["outage", "依赖故障"],
  ["storm", "风暴"],
  ["no storm", "无风暴"],
  ["operator", "人工"],
  ["window", "时间窗"],
  ["kept", "沿用"],
  ["trip", "断开时"],
  ["probes", "探测"],
];

const patterns = zh.map(([text, said]): [RegExp, string[]] => [
  new RegExp("^" + text.split("*").map((part) => part.replace(/[.()]/g, "\\$&")).join("(.+?)") + "(: .*)?$", "s"),
  said.split("*"),
]);

// answer is a text of a process in the person's language; one without a translation is as it is.
export function answer(w: Words, text: string): string {
  if (w !== languages.zh) {
    return text;
  }
  for (const [pattern, parts] of patterns) {
    const found = pattern.exec(text);
    if (found) {
      return parts.map((part, i) => part + (i < parts.length - 1 ? answer(w, found[i + 1] ?? "") : "")).join("") + (found[parts.length] ?? "");
    }
  }
  return text;
}

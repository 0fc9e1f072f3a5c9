// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package guardkafka guards sarama consumer groups.
//
// Start with [Wrap]: it makes a consumer group's handler from a plain function. Package guard
// decides for each message whether it is handled, retried, held or dead-lettered. [WrapHandler]
// is for a program that already has a handler, which marks messages itself. Its comment lists
// what it cannot do.
//
// [NewDLQ] makes a writer of dead letters. [Check] tells before the start what Setup would
// refuse. [Inspect] finds other settings that would lose or hide messages. [WatchErrors] logs
// errors that sarama sends only to a channel.
//
// # Marks
//
// Kafka keeps one position for each group and partition. The adapter marks the low watermark: the
// offset below which all delivered messages are settled. A message that waits for its retry, its
// probe or its dead letter keeps all later messages unmarked, even those that are done. If the
// partition moves meanwhile, they are handled again. They count towards Policy.Window, so there
// is at most a window of them: then intake stops until the waiting message is settled. Held
// messages are a bounded window in front of the log. A message is never marked because it is
// held.
//
// # Rebalances and faults
//
//   - A rebalance, eager or cooperative: the claim ends well within the rebalance timeout. Its
//     held messages are dropped, handlers that still run after a second are cancelled, and its
//     settled messages are marked. An open breaker stays open in this process. The partition's
//     next owner must find out for itself.
//   - A leader moves, or a broker restarts: sarama reads on. Messages that could not be committed
//     are handled again.
//   - A topic is deleted: its claims end when the group's leader has looked at the topics again
//     (Metadata.RefreshFrequency, 10min). sarama's Consume returns an error until the topic is
//     back.
//   - The process is killed: messages handled since the last commit are handled again, and those
//     handled behind a waiting one, a window at most. sarama commits each second
//     (Consumer.Offsets.AutoCommit.Interval), and this adapter after 512 messages of a partition.
//     Between two such commits it pauses for a tenth of that interval, at most 1s.
//
// # Retry topics
//
// With [WithRetryTopics] a message whose attempts are used up is parked: it waits in a topic for
// minutes or hours, and is then handled again. The later messages of its key follow it into the
// topic. [NewRetryTopics] makes or checks the topics.
//
// # Attempts
//
// Kafka does not count deliveries. The guard counts attempts in memory, for one claim. After a
// rebalance the count starts again, so a message may get more attempts than the policy says,
// never fewer. A parked message takes its count along.
//
// # Transactions
//
// A handler may use its own transactional producer. It must not add the consumed offset to the
// transaction. When the transaction aborts, it must return the error: the message is then handled
// again in its place. A loop that goes on after an abort loses the aborted messages, because its
// next mark passes them. That is so with or without [WrapHandler] and MarkMessage: report the
// abort by [Fail].
package guardkafka

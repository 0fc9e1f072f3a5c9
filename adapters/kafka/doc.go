// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package guardkafka guards sarama consumer groups.
//
// [Wrap] is the shape to choose: a plain function becomes a consumer group's
// handler, and each message is handled, retried, held or dead-lettered as package
// guard decides. [WrapHandler] keeps a handler that exists already and marks by
// itself; its comment lists what that shape cannot do.
//
// [NewDLQ] makes a writer of dead letters. [Check] says before the start what
// Setup would refuse, [Inspect] what else would lose or hide messages, and
// [WatchErrors] what sarama only tells on a channel.
//
// # What is marked
//
// Kafka keeps one position for a group and partition. What is marked here is the
// low watermark: the end of the prefix of delivered messages that are settled. A
// message that waits for its retry, its probe or its dead letter keeps all behind
// it unmarked, however many of them are done; they are handled again if the partition
// moves meanwhile. They count towards Policy.Window, so a window of them is the most:
// then intake stops until that message is settled. Held messages are a bounded
// window in front of the log; nothing is marked because it is in there.
//
// # What happens when
//
// A rebalance, eager or cooperative: what is held is dropped, the handler's
// context ends, what is settled is marked, and the claim is left well within the
// rebalance timeout. A breaker that is open stays so in the process that opened
// it; who gets the partition finds out for itself. A leader moves, a broker
// restarts: sarama reads on, and what could not be committed is handled again. A
// topic is deleted: its claims end once the group's leader has looked at the
// topics again (Metadata.RefreshFrequency, 10min), and Consume returns an error
// until it is there again. The process is killed: what was handled since the last commit
// (Consumer.Offsets.AutoCommit.Interval, 1s) is handled again, and what was handled
// behind a message that waits, a window at most.
//
// # Retry topics
//
// With [WithRetryTopics] a message whose attempts are used up is parked in a topic
// for minutes or hours before it is handled again, and the later messages of its
// key follow it. [NewRetryTopics] makes or checks the topics.
//
// # Attempts
//
// Kafka counts no deliveries. Attempts are counted in memory, for one claim: after
// a rebalance a message begins anew, so it may get more attempts than the policy
// says, never fewer. What is parked takes its count along.
//
// # Transactions
//
// A handler may use a transactional producer of its own. It must not add the
// consumed offset to the transaction, and must return the error when it aborts:
// the message is then handled again in its place. A loop that goes on after an
// abort loses what it aborted, since the next mark passes it, with or without
// [WrapHandler] and MarkMessage; tell it by [Fail].
package guardkafka

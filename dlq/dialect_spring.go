// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package dlq

// springWrittenGrammar is what Encode writes. Spring adds its headers to existing ones, and
// its consumers read the last of each. Spring's first type is that of its own listener
// exception; the type of the cause is the useful one. kafka_dlt-original-timestamp-type is
// not written, since a Record has no such field.
var springWrittenGrammar = grammar{
	dialect: Spring,
	fields: []field{
		{"kafka_dlt-exception-fqcn", slotOuterType, text},
		{"kafka_dlt-exception-cause-fqcn", slotInnerType, text},
		{"kafka_dlt-exception-message", slotErrorMessage, text},
		{"kafka_dlt-exception-stacktrace", slotErrorStack, text},
		{"kafka_dlt-original-topic", slotSource, text},
		{"kafka_dlt-original-partition", slotPartition, int32BE},
		{"kafka_dlt-original-offset", slotOffset, int64BE},
		{"kafka_dlt-original-timestamp", slotTimestamp, millisBE},
		{"kafka_dlt-original-consumer-group", slotGroup, text},
	},
	owns: []string{"kafka_dlt-*"},
}

// springGrammar reads what Spring writes. That is more than Encode writes: failures to
// deserialise the key, and the count of its retry topics.
var springGrammar = grammar{
	dialect:   Spring,
	system:    "kafka",
	signature: [][]string{{"kafka_dlt-*"}},
	fields: append([]field{
		{"kafka_dlt-key-exception-fqcn", slotErrorType, text},
		{"kafka_dlt-key-exception-message", slotErrorMessage, text},
		{"kafka_dlt-key-exception-stacktrace", slotErrorStack, text},
		{"retry_topic-attempts", slotAttempts, int32BE},
		{"retry_topic-original-timestamp", slotTimestamp, millisBE},
	}, springWrittenGrammar.fields...),
	owns: []string{"kafka_dlt-*", "retry_topic-backoff-timestamp"},
}

// originalTopicGrammar is for Spring Cloud Stream, with big-endian numbers, and for headers
// that users write themselves, with decimal numbers.
var originalTopicGrammar = grammar{
	dialect:   originalTopic,
	system:    "kafka",
	signature: [][]string{{"x-original-topic"}},
	fields: []field{
		{"x-original-topic", slotSource, text},
		{"x-original-partition", slotPartition, int32Either},
		{"x-original-offset", slotOffset, int64Either},
		{"x-original-timestamp", slotTimestamp, millisEither},
		{"x-exception-fqcn", slotErrorType, text},
		{"x-exception-message", slotErrorMessage, text},
		{"x-exception-stacktrace", slotErrorStack, text},
	},
	owns: []string{"x-original-timestamp-type"},
}

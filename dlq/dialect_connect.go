// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package dlq

// connectGrammar has no header for a consumer group. Decode reads the connector's name as
// the group, since it distinguishes two readers of a topic. Encode does not write a group
// as a connector.
var connectGrammar = grammar{
	dialect:   Connect,
	system:    "kafka",
	signature: [][]string{{"__connect.errors.*"}},
	fields: []field{
		{"__connect.errors.topic", slotSource, text},
		{"__connect.errors.partition", slotPartition, decimal},
		{"__connect.errors.offset", slotOffset, decimal},
		{"__connect.errors.connector.name", slotGroup, readOnly(text)},
		{"__connect.errors.exception.class.name", slotErrorType, text},
		{"__connect.errors.exception.message", slotErrorMessage, text},
		{"__connect.errors.exception.stacktrace", slotErrorStack, text},
	},
	owns: []string{"__connect.errors.*"},
}

func readOnly(c codec) codec {
	c.encode = nil
	return c
}

var shareGroupGrammar = grammar{
	dialect:   shareGroup,
	system:    "kafka",
	signature: [][]string{{"__dlq.errors.*"}},
	fields: []field{
		{"__dlq.errors.topic", slotSource, text},
		{"__dlq.errors.partition", slotPartition, decimal},
		{"__dlq.errors.offset", slotOffset, decimal},
		{"__dlq.errors.group", slotGroup, text},
		{"__dlq.errors.delivery.count", slotDeliveries, decimal},
		{"__dlq.errors.message", slotErrorMessage, text},
	},
	owns: []string{"__dlq.errors.*"},
}

var streamsGrammar = grammar{
	dialect:   streams,
	system:    "kafka",
	signature: [][]string{{"__streams.errors.*"}},
	fields: []field{
		{"__streams.errors.topic", slotSource, text},
		{"__streams.errors.partition", slotPartition, decimal},
		{"__streams.errors.offset", slotOffset, decimal},
		{"__streams.errors.exception", slotErrorType, text},
		{"__streams.errors.message", slotErrorMessage, text},
		{"__streams.errors.stacktrace", slotErrorStack, text},
	},
	owns: []string{"__streams.errors.*"},
}

// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package retry

import (
	"strings"
	"testing"
	"time"

	"github.com/IBM/sarama"
)

// A message comes back as it was.
func TestParkedMessageComesBackAsItWas(t *testing.T) {
	t.Parallel()
	at := time.UnixMilli(1_700_000_000_123)
	was := &sarama.ConsumerMessage{
		Topic: "orders", Partition: 3, Offset: 42, Timestamp: at, Key: []byte("k"), Value: []byte("v"),
		Headers: []*sarama.RecordHeader{{Key: []byte("tenant"), Value: []byte("acme")}, {Key: []byte("tenant"), Value: nil}},
	}
	p := &Message{msg: was, origin: origin{offset: 42, stamp: stampOf(at)}, own: 2, moves: 5, tries: 7, first: 11, notBefore: 13, claim: "c"}
	m := p.producerMessage("orders.g.retry.2")
	back := &sarama.ConsumerMessage{Topic: m.Topic, Partition: m.Partition, Offset: 9, Timestamp: time.Now(), Key: was.Key, Value: was.Value}
	for _, h := range m.Headers {
		if strings.HasPrefix(string(h.Key), "x-") {
			t.Errorf("header %s", h.Key)
		}
		back.Headers = append(back.Headers, &h)
	}
	back.Headers = append(back.Headers, &sarama.RecordHeader{Key: []byte(retryGroup), Value: []byte("g")})
	got := readParked(back, 2)
	if g := got.msg; g.Topic != "orders" || g.Partition != 3 || g.Offset != 42 || !g.Timestamp.Equal(at) || string(g.Key) != "k" || string(g.Value) != "v" || len(g.Headers) != 2 {
		t.Errorf("%+v", g)
	}
	if got.origin != p.origin || got.own != 2 || got.moves != 5 || got.tries != 7 || got.first != 11 || got.notBefore != 13 || got.claim != "c" || got.group != "g" || got.at != 9 || got.level != 2 {
		t.Errorf("%+v", got)
	}
	tombstone := (&Message{msg: &sarama.ConsumerMessage{Topic: "orders"}}).producerMessage("t")
	if tombstone.Key != nil || tombstone.Value != nil {
		t.Error("a tombstone is none any more")
	}
}

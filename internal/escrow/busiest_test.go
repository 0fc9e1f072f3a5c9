// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import (
	"fmt"
	"testing"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

// The busiest keys come first, and what was taken from a pool counts.
func TestBusiest(t *testing.T) {
	s, err := New(crdt.Replica{Name: "a"}, Config{Limit: Limit{Rate: 1, Burst: 1000}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for i := range 20 {
		l := s.Key(fmt.Sprint("k", i))
		for range (i * 7) % 20 {
			l.Allow()
		}
	}
	if got := len(s.Busiest(0)) + len(s.Busiest(100)); got != 19+0 && got != 20 {
		t.Errorf("%d keys of 20, one of which was never asked for", got)
	}
	last := int64(1 << 62)
	for i, v := range s.Busiest(5) {
		want := int64(19-i) * micro
		if v.Admitted() != want || v.Admitted() > last {
			t.Errorf("place %d: %s with %d, want %d", i, v.Key, v.Admitted(), want)
		}
		last = v.Admitted()
	}
}

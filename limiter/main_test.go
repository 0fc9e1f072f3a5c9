// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package limiter

import (
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/escrow"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const ms = time.Millisecond

// closable is a limit of this process, with what closes it.
func closable(t testing.TB, l Limit, opts ...escrow.Option) (*Limiter, func()) {
	t.Helper()
	s, err := escrow.New(crdt.Replica{Name: "a"}, escrow.Config{Limit: escrow.Limit(l)}, opts...)
	if err != nil {
		t.Fatal(err)
	}
	return (*Limiter)(s.Key("k")), s.Close
}

func local(t testing.TB, l Limit) *Limiter {
	t.Helper()
	x, err := Local(l)
	if err != nil {
		t.Fatal(err)
	}
	return x
}

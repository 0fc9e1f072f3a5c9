// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package postgres_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/url"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"go.uber.org/goleak"

	"github.com/stormguard-mq/stormguard/fleet/register"
	"github.com/stormguard-mq/stormguard/fleet/register/postgres"
	"github.com/stormguard-mq/stormguard/internal/brokers"
	"github.com/stormguard-mq/stormguard/internal/registertest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// registerAt is an empty register in a database, each handle with a pool of its own.
func registerAt(t *testing.T, addr, direct string) registertest.Place {
	t.Helper()
	name := fmt.Sprintf("register-%016x", rand.Uint64())
	open := func(t *testing.T, addr string) *postgres.Register {
		cfg, err := pgxpool.ParseConfig(addr)
		if err != nil {
			t.Fatal(err)
		}
		cfg.MaxConns = 3
		cfg.ConnConfig.ConnectTimeout = 20 * time.Second
		pool, err := pgxpool.NewWithConfig(context.Background(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(pool.Close)
		r, err := postgres.New(pool, name)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	if err := open(t, direct).Create(t.Context()); err != nil {
		t.Fatal(err)
	}
	return registertest.Place{Open: func(t *testing.T) register.Register { return open(t, addr) }}
}

func TestRegister(t *testing.T) {
	t.Parallel()
	addr := brokers.ForTest(t, brokers.Postgres)
	registertest.Run(t, func(t *testing.T) registertest.Place { return registerAt(t, addr, addr) })
}

// Where transactions are isolated as strictly as can be, a conflict is another error
// of the server's.
func TestRegisterSerializable(t *testing.T) {
	t.Parallel()
	addr := brokers.ForTest(t, brokers.Postgres) + "&options=-c%20default_transaction_isolation%3Dserializable%20-c%20synchronous_commit%3Doff"
	registertest.Run(t, func(t *testing.T) registertest.Place { return registerAt(t, addr, addr) })
}

func TestRegisterFaults(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]func(*registertest.Relay, *testing.T){
		"Cut":    (*registertest.Relay).Cut,
		"Frozen": (*registertest.Relay).Freeze,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			addr := brokers.ForTest(t, brokers.Postgres)
			u, err := url.Parse(addr)
			if err != nil {
				t.Fatal(err)
			}
			relay := registertest.NewRelay(t, u.Host)
			u.Host = relay.Addr()
			p := registerAt(t, u.String(), addr)
			p.Break = func(t *testing.T) { fault(relay, t) }
			p.Mend = relay.Mend
			registertest.Fault(t, p)
		})
	}
	t.Run("Killed", func(t *testing.T) {
		t.Parallel()
		b := brokers.StartForTest(t, brokers.Postgres, brokers.Options{})
		p := registerAt(t, b.Addr(), b.Addr())
		p.Break, p.Mend = registertest.Killed(b)
		registertest.Fault(t, p)
	})
}

func TestNewRefuses(t *testing.T) {
	t.Parallel()
	if _, err := postgres.New(nil, "x"); err == nil {
		t.Error("no pool is taken")
	}
	for _, name := range []string{"", "a\x00b", string(make([]byte, 256))} {
		if _, err := postgres.New(new(pgxpool.Pool), name); err == nil {
			t.Errorf("name %.10q is taken", name)
		}
	}
}

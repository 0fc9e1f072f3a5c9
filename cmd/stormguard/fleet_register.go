// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/IBM/sarama"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/spf13/pflag"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stormguard-mq/stormguard/adapters/amqp"
	"github.com/stormguard-mq/stormguard/adapters/kafka"
	"github.com/stormguard-mq/stormguard/adapters/nats"
	"github.com/stormguard-mq/stormguard/breaker/etcd"
	"github.com/stormguard-mq/stormguard/cmd/stormguard/internal/access"
	"github.com/stormguard-mq/stormguard/fleet/register"
	"github.com/stormguard-mq/stormguard/fleet/register/postgres"
)

const registerForms = "file:PATH, etcd://HOST:PORT,..., nats://HOST:PORT,..., kafka://HOST:PORT,..., amqp://HOST:PORT/VHOST or postgres://HOST:PORT/DATABASE"

// registerFlags are the flags for the store of a fleet's configuration.
type registerFlags struct {
	url    string
	access access.Config
}

func (f *registerFlags) bind(rs *ranges, flags *pflag.FlagSet) {
	flags.StringVar(&f.url, "register", "", "`URL` of the store that keeps the configuration: "+registerForms+". Without it the configuration is static")
	f.access.Prefix = "register-"
	accessFlags(rs, flags, &f.access, "speak TLS; --register-ca and --register-cert turn it on too (RabbitMQ: amqps:// in --register)", true)
}

// kind is the kind of store: the scheme of the URL, or its main form.
func (f *registerFlags) kind() string {
	scheme, _, _ := strings.Cut(f.url, ":")
	switch scheme {
	case "tls", "ws", "wss":
		return "nats"
	case "amqps":
		return "amqp"
	case "postgresql":
		return "postgres"
	}
	return scheme
}

func (f *registerFlags) validate() error {
	switch f.kind() {
	case "":
		if f.access.WantsTLS() || f.access.User != "" {
			return errors.New("--register: must be given with --register-tls, --register-ca, --register-cert or --register-user")
		}
		return nil
	case "file":
		return f.access.Validate(false)
	case "etcd", "nats", "kafka", "amqp", "postgres":
		err := f.access.Validate(f.kind() == "kafka")
		_, hosts, _ := strings.Cut(f.url, "://")
		switch kind := f.kind(); {
		case strings.Contains(f.url, "@") && (kind == "etcd" || kind == "kafka"):
			// The clients of these stores take hosts only, and repeat them in errors and logs.
			err = errors.Join(err, fmt.Errorf("--register %s://...@...: must be without a user: give --register-user and --register-password-file", kind))
		case kind != "postgres" && (hosts == "" || strings.ContainsAny(hosts[:1], "/,")):
			err = errors.Join(err, fmt.Errorf("--register %q: has no host: must be %s", access.Redact(f.url), registerForms))
		}
		return err
	}
	return fmt.Errorf("--register %q: must be %s", access.Redact(f.url), registerForms)
}

// open makes the register of a fleet, and a function that closes it. Only wrong settings are an
// error: a store that does not answer may come back.
func (f *registerFlags) open(ctx context.Context, fleet string, stderr io.Writer) (r register.Register, closes func(), err error) {
	a, err := f.access.Open()
	if err != nil {
		return nil, nil, err
	}
	name := "stormguard-" + fleet
	_, hosts, _ := strings.Cut(f.url, "://")
	endpoints := strings.Split(strings.TrimSuffix(hosts, "/"), ",")
	closes = func() {}
	switch f.kind() {
	case "file":
		r, err = register.NewFile(strings.TrimPrefix(strings.TrimPrefix(f.url, "file:"), "//"))
	case "etcd":
		user, password := a.User()
		var client *clientv3.Client
		client, err = clientv3.New(clientv3.Config{
			Endpoints: endpoints, TLS: a.TLS(), Username: user, Password: password, Context: ctx,
			DialTimeout: storeTimeout, DialKeepAliveTime: storeTimeout, DialKeepAliveTimeout: storeTimeout,
		})
		if err == nil {
			closes = func() { _ = client.Close() }
			r, err = etcd.NewRegister(client, name)
		}
	case "nats":
		r, closes, err = f.nats(a, name)
	case "kafka":
		config := sarama.NewConfig()
		config.ClientID, config.Version = "stormguard-fleet", sarama.V3_6_0_0
		a.Kafka(config)
		var k *guardkafka.Register
		if k, err = guardkafka.NewRegister(endpoints, config, guardkafka.RegisterConfig{Topic: name}); err == nil {
			r, closes = k, func() { _ = k.Close() }
		}
	case "amqp":
		var address string
		if address, err = a.URL(f.url); err == nil {
			dialer := guardamqp.Dial(address)
			dialer.Config.TLSClientConfig = a.TLS()
			var q *guardamqp.Register
			if q, err = guardamqp.NewRegister(dialer, guardamqp.RegisterConfig{Stream: name}); err == nil {
				r, closes = q, func() { _ = q.Close() }
			}
		}
	case "postgres":
		r, closes, err = f.postgres(ctx, a, fleet, stderr)
	}
	if err != nil {
		closes()
		return nil, nil, usageError{fmt.Errorf("--register: %w", redacted(err))}
	}
	return r, closes, nil
}

// storeTimeout is the time limit for a store's answer. After it the store counts as away.
const storeTimeout = 5 * time.Second

// redacted removes users and passwords from a client's error.
func redacted(err error) error { return errors.New(access.Redact(err.Error())) }

func (f *registerFlags) nats(a *access.Access, bucket string) (r register.Register, closes func(), err error) {
	closes = func() {}
	nc, err := nats.Connect(f.url, append(a.NATS(), nats.Name("stormguard fleet"), nats.RetryOnFailedConnect(true), nats.MaxReconnects(-1), nats.IgnoreAuthErrorAbort(), nats.ReconnectWait(time.Second))...)
	if err != nil {
		return nil, closes, err
	}
	closes = nc.Close
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, closes, err
	}
	r, err = guardnats.NewRegister(js, guardnats.RegisterConfig{Bucket: bucket})
	return r, closes, err
}

func (f *registerFlags) postgres(ctx context.Context, a *access.Access, fleet string, stderr io.Writer) (_ register.Register, closes func(), err error) {
	closes = func() {}
	config, err := pgxpool.ParseConfig(f.url)
	if err != nil {
		return nil, closes, errors.New("the URL cannot be read") // the client's error may have a password
	}
	if user, password := a.User(); user != "" {
		config.ConnConfig.User, config.ConnConfig.Password = user, password
	}
	if t := a.TLS(); t != nil {
		t.ServerName = config.ConnConfig.Host
		config.ConnConfig.TLSConfig, config.ConnConfig.Fallbacks = t, nil
	}
	config.ConnConfig.ConnectTimeout = storeTimeout
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, closes, err
	}
	closes = pool.Close
	r, err := postgres.New(pool, fleet)
	if err != nil {
		return nil, closes, err
	}
	making, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	if err := r.Create(making); err != nil {
		_, _ = fmt.Fprintf(stderr, "stormguard: --register: the table was not looked for: %v\n", redacted(err))
	}
	return r, closes, nil
}
